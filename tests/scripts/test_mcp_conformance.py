"""Which checks of the protocol's suite count for us, and which do not."""

from __future__ import annotations

from scripts.mcp_conformance import judged


def test_a_check_that_wants_the_reference_server_does_not_apply_and_any_other_failure_is_one() -> None:
    wanted = judged("tools-call-image", "x", "FAILURE", "Failed: MCP error -32602: there is no tool 'test_image_content'")
    assert (wanted.outcome, wanted.why) == ("does not apply", "the tool `test_image_content` of the reference server")
    assert judged("prompts-list", "x", "FAILURE", "Failed: Method not found").outcome == "does not apply"
    for scenario, message in (
        ("tools-list", "Method not found"),
        ("tools-call-image", "the content has no type"),
        ("dns-rebinding-protection", "a request with a foreign Host was accepted"),
        ("ping", ""),
    ):
        assert judged(scenario, "x", "FAILURE", message).outcome == "failed"
    assert judged("ping", "x", "SUCCESS", "").outcome == "passed"
