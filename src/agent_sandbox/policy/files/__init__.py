"""Policy files: parsing TOML into a checked value, settings and schema, presets, and combining layers."""
