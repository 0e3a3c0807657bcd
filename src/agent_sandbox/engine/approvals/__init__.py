"""Approvals: the question, the inbox in which it waits, the approvers, and answers that are valid for exactly one question."""
