"""Pure decisions: when a request runs again, who gets a place, who is who, what may be asked."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path

import pytest

from services.common.clock import VirtualClock
from services.common.errors import Api, Failure, Reason
from services.entrypoint.admission import Door, Load
from services.entrypoint.api.dialect import (
    error_body,
    error_response,
    failure_frames,
    public_message,
)
from services.entrypoint.auth import (
    Identity,
    KeyLimits,
    StoredKey,
    authenticate,
    bearer_key,
    digest_key,
    format_keys,
    parse_keys,
)
from services.entrypoint.body_checks import check_body, parse_skeleton
from services.entrypoint.json_scan import JsonScanner
from services.entrypoint.key_store import KeyStore
from services.entrypoint.ledger import Entry, Ledger, Outcome
from services.entrypoint.limits import Limits
from services.entrypoint.quota import Quota
from services.entrypoint.retry import GiveUp, RetryBudget, RetryPolicy, RunAgain, decide

RNG = random.Random(1)


# ---- retry ----------------------------------------------------------------------------------


def decision(
    reason: Reason,
    attempt: int = 1,
    incident: str = "i",
    budget: RetryBudget | None = None,
    remaining_s: float = 60.0,
) -> RunAgain | GiveUp:
    policy = RetryPolicy()
    return decide(
        Failure(reason),
        attempt=attempt,
        incident=incident,
        remaining_s=remaining_s,
        policy=policy,
        budget=budget or RetryBudget(policy),
        rng=RNG,
    )


def test_a_lost_engine_is_replaced_at_once_and_three_attempts_are_all() -> None:
    assert decision(Reason.BACKEND_LOST) == RunAgain(0.0)
    assert isinstance(decision(Reason.BACKEND_LOST, attempt=2), RunAgain)
    assert isinstance(decision(Reason.BACKEND_LOST, attempt=3), GiveUp)


@pytest.mark.parametrize(
    "reason",
    [
        Reason.INVALID_REQUEST,
        Reason.CONTEXT_LENGTH,
        Reason.NOT_FITTING,
        Reason.QUOTA,
        Reason.DEADLINE,
        Reason.CLIENT_CANCELLED,
        Reason.UNSUPPORTED_FEATURE,
        Reason.OVERLOADED,
        Reason.QUEUE_TIMEOUT,
    ],
)
def test_what_another_engine_would_answer_alike_is_not_tried_again(reason: Reason) -> None:
    assert isinstance(decision(reason), GiveUp)


def test_a_bug_is_tried_once_more_only() -> None:
    assert isinstance(decision(Reason.INTERNAL), RunAgain)
    assert isinstance(decision(Reason.INTERNAL, attempt=2), GiveUp)


def test_an_engine_that_forgot_the_request_is_no_missing_model() -> None:
    last = decision(Reason.NOT_FOUND, attempt=3)
    assert isinstance(last, GiveUp)
    assert last.failure.reason is Reason.BACKEND_LOST


def test_p_11_one_incident_is_paid_once_and_a_storm_runs_dry() -> None:
    policy = RetryPolicy(budget_floor=10)
    budget = RetryBudget(policy)
    for _ in range(50):  # fifty streams of one lost instance
        assert isinstance(decision(Reason.BACKEND_LOST, incident="one", budget=budget), RunAgain)
    assert budget.level == 9
    num_requests, num_retries = 1000, 0
    for i in range(num_requests):
        budget.on_request()
        again = decision(Reason.BACKEND_LOST, incident=f"r{i}", budget=budget)
        num_retries += isinstance(again, RunAgain)
    assert num_retries <= 0.1 * num_requests + 10


def test_no_time_left_is_a_deadline() -> None:
    last = decision(Reason.ENGINE_FULL, remaining_s=0.0)
    assert isinstance(last, GiveUp)
    assert last.failure.reason is Reason.DEADLINE


# ---- quotas ---------------------------------------------------------------------------------


def identity(**limits: int) -> Identity:
    return Identity("k", "t", limits=KeyLimits(**limits))


def test_ur_62_parallel_requests_are_counted_before_any_passes() -> None:
    quota = Quota(1000)
    who = identity(tokens_per_minute=10_000)
    admitted, refusals = 0, []
    for _ in range(100):
        try:
            grant = quota.begin(who, 0.0)
            quota.reserve_tokens(grant, who, 1000, 0.0)
            admitted += 1
        except Failure as failure:
            refusals.append(failure)
    assert admitted == 10
    assert {failure.reason for failure in refusals} == {Reason.QUOTA}
    assert all((failure.retry_after_s or 0) > 0 for failure in refusals)


def test_ur_63_entrypoints_share_one_limit() -> None:
    who = identity(tokens_per_minute=10_000, max_concurrent=8)
    admitted = 0
    for _ in range(2):
        quota = Quota(64)
        quota.set_num_entrypoints(2)
        for _ in range(50):
            try:
                grant = quota.begin(who, 0.0)
            except Failure:
                continue
            try:
                quota.reserve_tokens(grant, who, 1000, 0.0)
                admitted += 1
            except Failure:
                pass
            quota.settle(grant, 1000)
    assert admitted <= 10_000 * 1.05 / 1000


def test_p_14_counters_come_back_and_unused_tokens_too() -> None:
    quota = Quota(2)
    who = identity(tokens_per_minute=1000)
    grant = quota.begin(who, 0.0)
    quota.reserve_tokens(grant, who, 900, 0.0)
    with pytest.raises(Failure):
        quota.reserve_tokens(quota.begin(who, 0.0), who, 200, 0.0)
    quota.settle(grant, 100)
    quota.settle(grant, 100)
    again = quota.begin(who, 0.0)
    quota.reserve_tokens(again, who, 800, 0.0)
    assert quota.num_in_flight == 2


def test_a_rate_comes_back_with_time_only() -> None:
    quota = Quota(100)
    who = identity(requests_per_minute=60)
    for _ in range(60):
        quota.settle(quota.begin(who, 0.0))
    with pytest.raises(Failure) as caught:
        quota.begin(who, 0.0)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    quota.begin(who, 1.5)


async def test_p_13_a_key_over_its_share_waits_and_others_do_not() -> None:
    import asyncio

    limits = Limits(max_concurrent_per_key=1, max_queued_per_key=2)
    quota = Quota(1)
    door = Door(quota, limits, VirtualClock())
    first, other = Identity("a", "a"), Identity("b", "b")
    grant = await door.enter(first)
    waiting = [asyncio.ensure_future(door.enter(first)) for _ in range(2)]
    await asyncio.sleep(0)
    assert door.num_waiting == 2
    with pytest.raises(Failure, match="waiting"):
        await door.enter(first)
    await door.enter(other)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    door.leave(grant)
    door.leave(await waiting[1])
    assert door.num_waiting == 0
    assert quota.num_in_flight == 1


def test_load_is_bounded_in_requests_and_tokens() -> None:
    load = Load(2, 100)
    one, two = load.enter(), load.enter()
    with pytest.raises(Failure) as caught:
        load.enter()
    assert caught.value.reason is Reason.OVERLOADED
    load.add_tokens(one, 500)  # alone it always fits
    with pytest.raises(Failure):
        load.add_tokens(two, 1)
    one.leave()
    one.leave()
    load.add_tokens(two, 50)
    two.leave()
    assert (load.num_requests, load.num_tokens) == (0, 0)


# ---- keys -----------------------------------------------------------------------------------


def stored(key: str, **fields: object) -> StoredKey:
    return StoredKey(Identity(key, "t"), digest_key(b"p", key), **fields)  # type: ignore[arg-type]


def test_s_01_keys_are_known_by_digest_and_refused_when_over() -> None:
    keys = [stored("good"), stored("old", expires_unix_s=100.0), stored("bad", revoked=True)]
    assert authenticate("good", keys, b"p", 200.0).key_id == "good"
    assert authenticate("old", keys, b"p", 99.0).key_id == "old"
    for key, pepper in (
        *((None, b"p"), ("", b"p"), ("wrong", b"p"), ("goo", b"p"), ("good ", b"p")),
        *(("good", b"q"), ("old", b"p"), ("bad", b"p"), ("x" * 10_000, b"p")),
    ):
        with pytest.raises(Failure) as caught:
            authenticate(key, keys, pepper, 200.0)
        assert caught.value.reason is Reason.UNAUTHENTICATED


def test_keys_come_in_either_header_and_never_twice() -> None:
    assert bearer_key([(b"authorization", b"Bearer abc")]) == "abc"
    assert bearer_key([(b"authorization", b"bearer  abc ")]) == "abc"
    assert bearer_key([(b"x-api-key", b"abc")]) == "abc"
    assert bearer_key([(b"x-api-key", b"abc"), (b"authorization", b"Bearer abc")]) == "abc"
    assert bearer_key([(b"accept", b"*/*")]) is None
    for headers in (
        [(b"authorization", b"Basic abc")],
        [(b"x-api-key", b"abc"), (b"authorization", b"Bearer other")],
    ):
        with pytest.raises(Failure):
            bearer_key(headers)


def test_the_first_start_makes_a_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = KeyStore(tmp_path / "keys", clock=clock)
    assert store.open()
    key = store.key_path.read_text().strip()
    assert store.identify(key).tenant == "default"
    for name in ("api-key", "pepper", "keys.json"):
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    assert key not in (tmp_path / "keys" / "keys.json").read_text()
    again = KeyStore(tmp_path / "keys", clock=clock)
    assert not again.open()
    assert again.identify(key).key_id == "first"


def test_s_01_a_revoked_key_stops_at_the_next_look_and_a_bad_file_changes_nothing(
    tmp_path: Path,
) -> None:
    store = KeyStore(tmp_path, clock=VirtualClock())
    store.open()
    key = store.key_path.read_text().strip()
    file = tmp_path / "keys.json"
    good = file.read_text()
    file.write_text("{ not json")
    assert not store.reload()
    assert store.identify(key)
    document = json.loads(good)
    document["keys"][0]["revoked"] = True
    replacement = tmp_path / "new"
    replacement.write_text(json.dumps(document))
    replacement.replace(file)
    assert store.reload()
    with pytest.raises(Failure, match="revoked"):
        store.identify(key)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"keys": 3}',
        '{"keys": [{"id": "a", "tenant": "t", "digest": "zz"}]}',
        '{"keys": [{"id": "a", "tenant": "t", "digest": "00"}]}',
        '{"keys": [{"id": "", "tenant": "t", "digest": "' + "00" * 32 + '"}]}',
        '{"keys": [{"id": "a", "tenant": "t", "digest": "' + "00" * 32 + '", "admin": true}]}',
        '{"keys": [{"id": "a", "tenant": "t", "digest": "' + "00" * 32 + '", "scopes": ["x"]}]}',
    ],
)
def test_a_key_file_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_keys(text)


def test_a_key_file_is_read_as_it_was_written() -> None:
    limits = KeyLimits(max_concurrent=3, tokens_per_minute=5)
    entry = StoredKey(
        Identity("a", "t", frozenset({"inference"}), limits), b"\1" * 32, 5.0, revoked=True
    )
    assert parse_keys(format_keys([entry])) == (entry,)


def test_a_missing_scope_is_forbidden() -> None:
    with pytest.raises(Failure) as caught:
        Identity("a", "t", frozenset()).demand("inference")
    assert caught.value.reason is Reason.FORBIDDEN


# ---- error shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(Reason))
@pytest.mark.parametrize("api", list(Api))
def test_every_reason_has_its_shape_in_every_api(reason: Reason, api: Api) -> None:
    failure = Failure(reason, "secret at 10.0.0.7:7201", {"a": "b"})
    response = error_response(failure, api, "req-1", RNG)
    headers = dict(response.headers)
    body = json.loads(response.body)
    shown = reason.shown_as
    assert response.status == shown.http_status(api)
    assert headers[b"x-request-id"] == b"req-1"
    assert headers[b"x-error-reason"] == shown.value.encode()
    retry = shown.facts.sdk_should_retry
    assert headers[b"x-should-retry"] == (b"true" if retry else b"false")
    assert (b"retry-after" in headers) is retry
    if retry:
        assert 1 <= int(headers[b"retry-after"]) <= 30
    if api is Api.MESSAGES:
        assert body["type"] == "error"
        assert body["request_id"] == "req-1"
        assert body["error"]["type"] == shown.http_type(api)
        assert set(body["error"]) == {"type", "message"}
    else:
        kind = shown.http_type(api)
        assert body["error"]["type"] == kind
        assert body["error"]["param"] is None
        assert body["error"]["code"] == ("invalid_request_error" if response.status < 500 else kind)
    if response.status >= 500:
        assert "10.0.0.7" not in response.body.decode()


def test_a_codec_body_passes_unchanged() -> None:
    text = '{"error": {"message": "é", "odd": 1}}'
    failure = Failure(Reason.INVALID_REQUEST, "x", {"body": text, "http_status": "400"})
    response = error_response(failure, Api.MESSAGES, "r", RNG)
    assert response.body.decode() == text
    assert response.status == 400


def test_ur_26_failure_frames_go_on_counting_and_are_terminal() -> None:
    failure = Failure(Reason.BACKEND_LOST, "x")
    chat = failure_frames(failure, Api.CHAT, "r", "id", 4).decode()
    assert chat.startswith('data: {"error"')
    assert chat.endswith("data: [DONE]\n\n")
    responses = failure_frames(failure, Api.RESPONSES, "r", "id", 4).decode()
    assert responses.startswith("event: response.failed\n")
    event = json.loads(responses.split("data: ")[1])
    assert event["sequence_number"] == 4
    assert event["response"]["status"] == "failed"
    messages = failure_frames(failure, Api.MESSAGES, "r", "id", 4).decode()
    assert messages.startswith("event: error\n")
    assert "message_stop" not in messages


def test_messages_of_our_own_keep_their_numbers() -> None:
    failure = Failure(Reason.BODY_TOO_LARGE, "the request body has 9 bytes, the limit is 5")
    assert "9 bytes" in json.loads(error_body(failure, Api.CHAT, "r"))["error"]["message"]


# ---- contents -------------------------------------------------------------------------------


def check(document: object, api: Api = Api.CHAT, limits: Limits | None = None) -> None:
    limits = limits or Limits()
    scanner = JsonScanner(limits)
    scanner.feed(json.dumps(document).encode())
    check_body(parse_skeleton(scanner.finish()), api, limits)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"messages": [{}] * 10_001}, "messages"),
        ({"messages": [{"content": [{}] * 2_001}]}, "messages[0].content"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"stop": "x" * 9000}, "stop[0]"),
        ({"stop_sequences": ["ok", "x" * 257]}, "stop_sequences[1]"),
        ({"tools": [{}] * 129}, "tools"),
        ({"tools": [{"d": "x" * 2_000_000}]}, "tools"),
        ({"tools": [{"d": ["y" * 8000] * 140}]}, "tools"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
    ],
)
def test_ur_71_a_list_over_its_limit_is_named_with_the_limit(document: object, field: str) -> None:
    with pytest.raises(Failure) as caught:
        check(document)
    assert caught.value.metadata["field"] == field
    assert any(key.startswith("max_") for key in caught.value.metadata)
    assert field.split("[")[0] in caught.value.message


def test_lists_at_their_limits_pass() -> None:
    check({"messages": [{"content": [{}] * 2000}] * 3, "tools": [{}] * 128})
    check({"stop": ["é" * 256] * 16, "metadata": {str(i): "x" * 512 for i in range(16)}})


@pytest.mark.parametrize(
    ("document", "api", "field"),
    [
        ({"guided_json": {}}, Api.CHAT, "guided_json"),
        ({"guided_regex": "a"}, Api.RESPONSES, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "schema": {}}},
            Api.CHAT,
            "response_format.schema",
        ),
        ({"text": {"format": {"type": "json_object"}}}, Api.CHAT, "text.format"),
        ({"response_format": {"type": "json_object"}}, Api.RESPONSES, "response_format"),
        ({"response_format": {"type": "json_object"}}, Api.MESSAGES, "response_format"),
        ({"output_format": {"type": "json_schema"}}, Api.MESSAGES, "output_format"),
    ],
)
def test_ur_67_a_constraint_in_the_wrong_place_is_refused(
    document: object, api: Api, field: str
) -> None:
    with pytest.raises(Failure) as caught:
        check(document, api)
    assert caught.value.metadata["field"] == field


def test_ur_70_fields_of_the_ignore_list_pass_whatever_they_hold() -> None:
    for value in (-1, 2**31, "AI", {str(i): 1 for i in range(2000)}, None):
        check({"messages": [], "logit_bias": value})


# ---- ledger ---------------------------------------------------------------------------------


def test_p_40_each_request_ends_once() -> None:
    ledger = Ledger(2)
    entries = [ledger.open(Entry(f"r{i}", "t", "chat", 0.0)) for i in range(4)]
    with pytest.raises(Failure) as caught:
        ledger.open(Entry("r0", "t", "chat", 0.0))
    assert caught.value.reason is Reason.CONFLICT
    for entry in entries:
        ledger.close(entry, Outcome.OK)
    with pytest.raises(AssertionError):
        ledger.close(entries[0], Outcome.INTERNAL)
    assert sum(ledger.num_outcomes.values()) == ledger.num_accepted == 4
    assert (ledger.num_open, ledger.num_kept) == (0, 2)  # bounded
    assert ledger.explain("r3", "t").outcome is Outcome.OK
    for request_id, tenant in (("r3", "other"), ("r0", "t")):
        with pytest.raises(Failure) as caught:
            ledger.explain(request_id, tenant)
        assert caught.value.reason is Reason.NOT_FOUND


@pytest.mark.parametrize("reason", [Reason.BACKEND_LOST, Reason.NO_INSTANCE])
def test_a_lost_codec_is_not_called_an_engine(reason: Reason) -> None:
    said = public_message(Failure(reason, "recipe-18c09aeac9 at 127.0.0.1:4711 is gone"))
    assert "engine" not in said
    assert "127.0.0.1" not in said
    assert said.endswith(("again.", "later."))
