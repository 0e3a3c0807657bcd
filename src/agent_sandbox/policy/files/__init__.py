"""Policy files: TOML into a checked value, its settings and schema, presets, and how layers of policy combine."""
