"""The timeline of a session: its steps, the states that were kept, and the ways back to them."""
