"""Tests of the frameworks' own suites that do not apply to us, each with its reason.

"as root" or "as a user" begins a reason that holds for one of them; "the framework" begins one that is checked with a backend of plain
processes, which fails the same test.
"""

from __future__ import annotations

_GLOB = "the framework's own base class of this version answers with absolute paths, and this test expects relative ones"

REASONS = {
    (
        "pydantic-ai",
        "test_permission_denied_uses_builtin_error",
    ): "as root the test skips itself: root reads what nobody may; it passes as a user",
    ("inspect-ai", "test_exec_as_user"): "a sandbox has one user: it adds another account and runs commands as that one",
    ("deepagents", "test_glob"): _GLOB,
    ("deepagents", "test_glob_basic_pattern"): _GLOB,
    (
        "deepagents",
        "test_glob_with_directories",
    ): "the framework's own base class of this version lists files only, and this test expects directories",
    ("deepagents", "test_glob_hidden_files_explicitly"): _GLOB,
    ("deepagents", "test_glob_with_character_class"): _GLOB,
    ("deepagents", "test_glob_with_question_mark"): _GLOB,
    (
        "deepagents",
        "test_write_existing_file_fails",
    ): "the framework's own base class of this version overwrites a file, and this test expects a refusal",
}
