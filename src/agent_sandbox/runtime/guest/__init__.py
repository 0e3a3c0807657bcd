"""Our code inside the sandbox: receive the program from the supervisor, and run it in this process."""
