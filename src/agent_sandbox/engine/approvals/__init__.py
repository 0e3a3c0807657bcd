"""Approvals: the question, the inbox in which it waits, the approvers, and answers, each valid for one question only."""
