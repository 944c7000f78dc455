"""Who calls, what they may do, and how much of it."""

import time

import pytest

from headway_server.bundles import Task
from headway_server.errors import AccessError, BudgetError, ForbiddenError, UnknownCallerError
from headway_server.observers import Observer
from headway_server.serving import access as access_module
from headway_server.serving.access import Access, AccessFile, Grant, Principal, format_grant, is_local, new_key
from headway_server.serving.calls import Calls, counted_tokens

TEXTS, IMAGES = Task.TEXT_CLASSIFICATION, Task.IMAGE_CLASSIFICATION


def access_of(text: str) -> Access:
    return Access(AccessFile.parse(text, "access.toml"))


def bearer(key: str) -> list[tuple[str, str]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {key}")]


@pytest.fixture
def key() -> str:
    return new_key()


@pytest.fixture
def entry(key):
    """Makes the lines of an access file with one key, `mine`."""
    return lambda **options: format_grant("mine", key, {"scopes": ["model:topics"]} | options)


def test_a_key_is_long_random_and_known_by_its_hash_alone(key, entry):
    assert key.startswith("hw_")
    assert len(key) == len("hw_") + 43  # 32 bytes in base64
    assert new_key() != key
    assert key not in entry()
    for metadata in (bearer(key), [("authorization", f"bearer {key}\n")], [("x-api-key", key)]):
        assert access_of(entry()).identify(metadata).name == "mine"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([], "has no API key"),
        (bearer("hw_another"), "this server does not know the API key"),
        ([("authorization", "Basic eA==")], "is not of the form 'Bearer KEY'"),
        (bearer(""), "this server does not know the API key"),
    ],
)
def test_whoever_shows_no_good_key_is_refused_and_no_message_repeats_it(entry, metadata, message):
    with pytest.raises(UnknownCallerError, match=message) as caught:
        access_of(entry()).identify(metadata)
    assert "another" not in str(caught.value)


@pytest.mark.parametrize("expires", ["2020-01-01", "2020-01-01T00:00:00+02:00"])
def test_a_key_ends_when_it_expires(key, entry, expires):
    later = access_of(entry() + "expires = 2100-01-01\n")
    assert later.identify(bearer(key)).name == "mine"
    with pytest.raises(UnknownCallerError, match="mine has expired"):
        access_of(entry() + f"expires = {expires}\n").identify(bearer(key))


@pytest.mark.parametrize(
    ("scopes", "may", "may_not"),
    [
        (["model:topics"], [(TEXTS, "topics")], [(TEXTS, "topics-2"), (IMAGES, "colours")]),
        (["model:top*"], [(TEXTS, "topics"), (IMAGES, "topical")], [(IMAGES, "colours")]),
        (["task:text_classification"], [(TEXTS, "topics"), (TEXTS, "other")], [(IMAGES, "colours")]),
        (["task:text_classification", "model:colours"], [(TEXTS, "topics"), (IMAGES, "colours")], [(IMAGES, "x")]),
        (["model:*"], [(TEXTS, "topics"), (IMAGES, "colours")], []),
        (["admin"], [], [(TEXTS, "topics")]),
    ],
)
def test_scopes_add_up_and_what_none_covers_is_forbidden(scopes, may, may_not):
    caller = Principal("mine", Grant(scopes=scopes))
    for _ in range(2):  # the second answer is remembered
        for task, model in may:
            caller.check_model(task, model)
        for task, model in may_not:
            with pytest.raises(ForbiddenError, match=f"key mine may not use model {model}; ask .* model:{model} or"):
                caller.check_model(task, model)


def test_only_the_scope_admin_may_change_the_server():
    Principal("mine", Grant(scopes=["admin"])).check_admin()
    with pytest.raises(ForbiddenError, match="key mine may not change the server; ask its operator for the scope adm"):
        Principal("mine", Grant(scopes=["model:*"])).check_admin()


def test_a_certificate_is_known_by_any_of_its_names_or_by_a_pattern():
    access = access_of("""
        [certificates."search.example.org"]
        scopes = ["model:topics"]
        [certificates."*.batch.example.org"]
        scopes = ["admin"]
    """)
    assert access.identify([], ("other", "search.example.org")).name == "search.example.org"
    one, two = (access.identify([], (f"{name}.batch.example.org",)) for name in ("one", "two"))
    assert (one.name, one is two) == ("one.batch.example.org", False)  # each has a budget of its own
    assert access.identify([], ("one.batch.example.org",)) is one
    with pytest.raises(ForbiddenError, match="does not list the certificate of 'else"):
        access.identify([], ("else.example.org",))


def test_a_key_counts_before_a_certificate_and_callers_without_either_may_be_let_in(key, entry):
    access = access_of(entry() + '[certificates.me]\nscopes = []\n[anonymous]\nscopes = ["model:topics"]')
    assert access.identify(bearer(key), ("me",)).name == "mine"
    assert access.identify([], ("me",)).name == "me"
    access.identify([]).check_model(TEXTS, "topics")
    with pytest.raises(ForbiddenError, match="a caller without a key may not use model colours"):
        access.identify([], ("unknown",)).check_model(IMAGES, "colours")
    with pytest.raises(UnknownCallerError):  # a wrong key is a mistake, and no reason to be let in without one
        access.identify(bearer("wrong"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """The time, which stands still until a test moves it: `clock.now += 1`."""

    class Clock:
        now = time.monotonic()

    monkeypatch.setattr(access_module.time, "monotonic", lambda: Clock.now)
    return Clock


def test_calls_a_second_are_held_to_on_average_with_a_burst(clock):
    caller = Principal("mine", Grant(scopes=[], calls_per_s=2, burst=3))
    for _ in range(3):
        caller.begin()
    with pytest.raises(BudgetError, match=r"key mine has used up its 2 calls a second; try again in 0\.50 s") as caught:
        caller.begin()
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now += 0.5
    caller.begin()
    clock.now += 100
    for _ in range(3):
        caller.begin()
    with pytest.raises(BudgetError):
        caller.begin()


def test_calls_at_a_time_are_held_to(clock):
    caller = Principal("mine", Grant(scopes=[], concurrency=2))
    first = caller.begin()
    caller.begin()
    with pytest.raises(BudgetError, match="its 2 calls at a time"):
        caller.begin()
    clock.now += 1
    caller.end(first)
    caller.begin()
    with pytest.raises(BudgetError) as caught:
        caller.begin()
    assert 0.05 < caught.value.retry_after_s < 1  # it learns how long calls take


def test_tokens_are_taken_when_they_are_known_and_paid_back_with_time(clock):
    caller = Principal("mine", Grant(scopes=[], tokens_per_minute=60))
    caller.begin()
    caller.count_tokens(59)
    caller.begin()
    caller.count_tokens(61)  # 60 more than there are
    with pytest.raises(BudgetError, match="its 60 tokens a minute") as caught:
        caller.begin()
    assert caught.value.retry_after_s == pytest.approx(61)
    clock.now += 61
    caller.begin()


def test_a_changed_file_keeps_what_was_used_up_and_forgets_who_is_gone(clock, key, entry):
    access = access_of(entry(concurrency=1, calls_per_s=1) + '[certificates.me]\nscopes = ["model:topics"]\n')
    caller, certified = access.identify(bearer(key)), access.identify([], ("me",))
    began_at = caller.begin()
    access.change(AccessFile.parse(entry(scopes=["admin"], concurrency=1, calls_per_s=2, burst=9), "new"))
    assert access.identify(bearer(key)) is caller
    caller.check_admin()
    with pytest.raises(ForbiddenError):
        caller.check_model(TEXTS, "topics")
    with pytest.raises(BudgetError, match="1 calls at a time"):
        caller.begin()
    caller.end(began_at)
    with pytest.raises(BudgetError, match="2 calls a second"):  # a larger budget is not a full one
        caller.begin()
    with pytest.raises(UnknownCallerError):
        access.identify([])
    with pytest.raises(ForbiddenError):
        access.identify([], ("me",))
    certified.check_model(TEXTS, "topics")  # of a call that runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys", "access.toml: is not TOML"),
        ("[key.a]", "access.toml: key is no setting; did you mean keys?"),
        ('[keys.a]\nsha256 = "hw_secret"\nscopes = []', "keys.a.sha256 is not 64 hexadecimal digits"),
        ("[keys.a]\nscopes = []", "keys.a.sha256 is missing"),
        (
            f'[keys.a]\nsha256 = "{"0" * 64}"\nscope = []',
            "keys.a.scope(s is missing| is no setting; did you mean scopes)",
        ),
        (f'[keys."a b"]\nsha256 = "{"0" * 64}"\nscopes = []', "keys.a b: a name has 1 to 64 letters"),
        ('[anonymous]\nscopes = ["task:genration"]', "there is no task 'genration'; did you mean generation?"),
        ('[anonymous]\nscopes = ["everything"]', "must be admin, task:TASK or model:NAME"),
        ("[anonymous]\nscopes = []\nconcurrency = 0", "anonymous.concurrency: Input should be greater"),
        (
            f'[keys.a]\nsha256 = "{"0" * 64}"\nscopes = []\n[keys.b]\nsha256 = "{"0" * 64}"\nscopes = []',
            "keys.b and keys.a are the same key",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_place_and_advice_and_without_values(text, message):
    with pytest.raises(AccessError, match=message.replace("?", r"\?")) as caught:
        AccessFile.parse(text, "access.toml")
    assert "secret" not in str(caught.value)


# Calls


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[tuple[tuple[str, str], ...], str]] = []

    def call_finished(self, call, *, error, duration_s) -> None:
        assert duration_s >= 0
        self.seen.append((call.metadata, type(error).__name__))


async def test_calls_are_held_to_the_rights_of_their_caller_and_observers_never_see_the_key(key, entry):
    recorder = Recorder()
    calls = Calls(access=access_of(entry(concurrency=1, tokens_per_minute=10)), observer=recorder)
    async with calls.answer("/one", metadata=bearer(key), caller="10.0.0.1") as call:
        assert call.caller == "mine"
        with pytest.raises(BudgetError):
            async with calls.answer("/two", metadata=bearer(key)):
                pass
        with counted_tokens(5, lambda: 6):
            pass
    with pytest.raises(BudgetError, match="10 tokens a minute"):
        async with calls.answer("/three", metadata=bearer(key)):
            pass
    with pytest.raises(UnknownCallerError):
        async with calls.answer("/four"):
            pass
    assert calls.num_running == 0
    assert [error for _, error in recorder.seen] == ["BudgetError", "NoneType", "BudgetError", "UnknownCallerError"]
    assert recorder.seen[0][0] == (("user-agent", "test"),)


def test_a_call_that_changes_the_server_needs_the_scope_admin(key, entry):
    recorder = Recorder()
    with pytest.raises(ForbiddenError, match="scope admin"):
        Calls(access=access_of(entry()), observer=recorder).identify("/load", metadata=bearer(key), is_admin=True)
    assert [error for _, error in recorder.seen] == ["ForbiddenError"]
    calls = Calls(access=access_of(entry(scopes=["admin"])))
    assert calls.identify("/load", metadata=bearer(key), is_admin=True).name == "mine"


async def test_without_access_control_everyone_calls_and_this_machine_alone_changes_the_server():
    calls = Calls()
    async with calls.answer("/one", caller="192.0.2.1") as call:
        assert (call.caller, call.rights) == ("192.0.2.1", None)
    assert calls.identify("/load", is_admin=True, is_local=True) is None
    with pytest.raises(ForbiddenError, match="only callers on the server's own machine"):
        calls.identify("/load", is_admin=True)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *((address, True) for address in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "unix:", "")),
        *((address, False) for address in ("192.0.2.1", "::", "0.0.0.0", "example.org", "::ffff:192.0.2.1")),
    ],
)
def test_an_address_of_this_machine_alone_is_known(address, local):
    assert is_local(address) is local
