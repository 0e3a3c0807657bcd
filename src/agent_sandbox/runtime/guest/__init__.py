"""What runs inside the sandbox: take the program from the supervisor and become it."""
