"""What the self-test runs inside a sandbox, and on the bare machine to show that it can succeed. Sent as text, never imported by us."""
