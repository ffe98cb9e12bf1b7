"""Extensions in the command and in the connector's configuration: found by name or by entry point, shown, judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lifecycle_driver import Driver, keys_of
from starvation_guard import StarvationGuard, Starving, StarvingKept
from stored_logs import write_log

from kvledger.adapters.core import available_extensions, composed_core
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.lifecycle import ConfigurationError, Core, Extension, RequestState, StateHandler, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.lifecycle.handlers import Running

GUARD = "starvation_guard:StarvationGuard"


class Shy(Running):
    """A handler in the place of one next to which the guard has one of its own."""

    tokens_settled = StateHandler.tokens_settled


SHY = f"{Shy.__module__}:{Shy.__name__}"


class Nameless(Extension):
    """One whose author forgot its name."""


NAMELESS = f"{Nameless.__module__}:{Nameless.__name__}"


def starving_log(directory: Path, core: Core) -> Path:
    """The log of a request that is preempted at once, where once is too often."""
    driver = Driver(num_slots=32, core=core, extensions={"starvation": {"num_preemptions": 1}})
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.preempt("a", 0)
    driver.finish("a", 17, 17)
    header = {**vocabulary_header(core), "handler_fingerprint": core.handler_fingerprint()}
    path: Path = write_log(directory / "log", driver.observed, driver.configuration, header=header)
    return path


@pytest.fixture
def starving(tmp_path: Path) -> Path:
    """Such a log of the handlers that are built in."""
    return starving_log(tmp_path, composed_core(extensions=[GUARD]))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package that names an extension by an entry point."""

    def install(extension: str) -> None:
        package = tmp_path / "site" / "starvation-1.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: starvation\nVersion: 1\n")
        (package / "entry_points.txt").write_text(f"[kvledger.extensions]\nstarvation = {extension}\n")
        monkeypatch.syspath_prepend(str(package.parent))

    return install


@pytest.fixture
def installed(install: Callable[[str], None]) -> None:
    """A package that names the guard by an entry point."""
    install(GUARD)


def test_a_log_is_verified_with_its_extension(run: Any, starving: Path) -> None:
    """By its own name; also decisions of its handlers are made again."""
    result = run("verify", starving, "--extensions", GUARD)
    assert result.exit_code == 0, result.out
    assert "which is not installed here" not in result.out


def test_without_it_the_rest_is_verified_and_what_is_not_is_named(run: Any, starving: Path) -> None:
    """The remark names the extension, its version and class, its rule, and what to do."""
    result = run("verify", starving)
    assert result.exit_code == 0, result.out
    printed = " ".join(result.out.split())
    assert f"was written with extension starvation 1 ({GUARD}), which is not installed here" in printed
    assert "1 event of extensions was accepted; its rules STARVING_KEPT were not checked" in printed
    assert "name it with --extensions" in printed


class Unsure(StarvingKept):
    """Cannot judge a preemption."""

    @on(e.RequestPreempted)
    def _preempted(self, _event: e.RequestPreempted) -> None:
        raise KeyError("the prompt")


class UnsureGuard(StarvationGuard):
    """The guard of a reader whose rule has a mistake."""

    rules: ClassVar[dict[str, Any]] = {Unsure.rule: Unsure}


class Leaves(StarvingKept):
    """Ends the process that asks it."""

    @on(e.RequestPreempted)
    def _preempted(self, _event: e.RequestPreempted) -> None:
        raise SystemExit(0)


class LeavingGuard(StarvationGuard):
    """The guard of a reader whose rule does so."""

    rules: ClassVar[dict[str, Any]] = {Leaves.rule: Leaves}


class Unreadable(StarvationGuard):
    """An extension that ends the process when it is made."""

    def __init__(self) -> None:
        raise SystemExit(0)


def test_an_extension_that_ends_the_process_when_it_is_made_is_refused(run: Any, starving: Path) -> None:
    """The exit code was 0, and nothing had been read."""
    result = run("verify", starving, "--extensions", f"{Unreadable.__module__}:{Unreadable.__name__}")
    assert result.exit_code == 64
    assert "cannot be created (SystemExit: 0)" in result.err


@pytest.mark.parametrize(("guard", "error"), [(UnsureGuard, "KeyError"), (LeavingGuard, "SystemExit")])
def test_a_rule_that_raises_is_named_and_the_rest_is_verified(
    run: Any, starving: Path, guard: type[StarvationGuard], error: str
) -> None:
    """With the error, without what that quotes; it is no failure, as a rule whose code is not here is none."""
    options = ("--extensions", f"{guard.__module__}:{guard.__name__}")
    result = run("verify", starving, *options)
    assert result.exit_code == 0, result.out
    printed = " ".join(result.out.split())
    assert (
        f"rule STARVING_KEPT of an extension could not be checked, or only in part: its checker raised {error}"
        in printed
    )
    assert "the prompt" not in printed
    assert f"{len(Core.standard().rules) - 1} checked over" in printed  # the extension says what is evicted last
    as_json = run("verify", starving, "--json", *options)
    assert "EVICTION_ORDER" in {each["rule"] for each in as_json.objects("not_checked")}
    assert Unsure.rule in {each["rule"] for each in as_json.objects("not_checked")}
    assert Unsure.rule not in as_json.objects("verdict")[0]["rules"]


class Exits(Starving):
    """An event that cannot be made again."""

    def __post_init__(self) -> None:
        """Leave."""
        raise SystemExit(0)


def _exits(*_arguments: object) -> Any:
    raise SystemExit(0)


class Mute(StarvationGuard):
    """One that leaves where it is asked for words or figures."""

    words = evidence = under_way = figures = _exits


class Unmakeable(StarvationGuard):
    """One that leaves where its event is read."""

    events: ClassVar[dict[str, Any]] = {"starving": Exits}


@pytest.mark.parametrize("command", ["verify", "show", "show a", "why a", "stats", "export --perfetto"])
@pytest.mark.parametrize("guard", [Mute, Unmakeable])
def test_an_extension_that_exits_costs_its_words_and_figures(
    run: Any, starving: Path, install: Any, command: str, guard: type[StarvationGuard]
) -> None:
    """Incident: `sys.exit()` in an extension's words ended `show` with "a mistake in kvledger itself"."""
    install(f"{guard.__module__}:{guard.__name__}")
    name, *rest = command.split()
    result = run(name, starving, *rest)
    # An event that cannot be made is damage for who judges, and left out by who shows.
    assert result.exit_code == (2 if (guard, name) == (Unmakeable, "verify") else 0), result.err
    if guard is Mute and command == "show a":
        assert "starvation 1: starving" in " ".join(result.out.split())


@pytest.mark.parametrize("options", [(), ("--extensions", GUARD)])
def test_its_events_and_sub_states_are_shown(run: Any, starving: Path, options: tuple[str, ...]) -> None:
    """In plain words, with or without its code: the payload says the names of its fields."""
    shown = " ".join(run("show", starving, "a").out.split())
    assert "starvation 1: starving (num_preemptions 1)" in shown
    assert "preempted.starving" in shown
    why = " ".join(run("why", starving, "a").out.split())
    assert "starvation 1: starving (num_preemptions 1)" in why
    assert "preempted.starving" in run("show", starving, "--at", 9).out
    described = run("core", starving, *options).out
    assert "sub-state preempted.starving" in described
    assert ("not installed here" in described) is not options or not options
    assert "preempted --starvation/starving--> preempted.starving" in described


def test_the_core_of_an_installation_is_shown(run: Any) -> None:
    """Without a log: what a connector would have here."""
    result = run("core")
    assert result.exit_code == 0
    assert Core.standard().fingerprint() in result.out
    assert "kvledger.lifecycle.handlers:Running" in result.out
    assert "LEGAL_TRANSITION" in result.out
    assert "blocks.observed in preempted: recovering, granted" in result.out
    assert "request.preempted: tracker" in result.out
    assert "chunked_prefill kvledger" in result.out, "a long name keeps apart from what stands behind it"


@pytest.mark.usefixtures("installed")
def test_an_extension_is_found_by_its_entry_point(run: Any, starving: Path) -> None:
    """Once, also where the configuration names it too; a log written without it is read without it."""
    core = ConnectorSettings.from_extra_config({"extensions": [GUARD]}).core()
    assert [extension.name for extension in core.extensions] == ["starvation"]
    assert "which is not installed here" not in run("verify", starving).out
    assert f"starvation 1, {GUARD}" in run("core").out


@pytest.mark.usefixtures("installed")
def test_a_log_of_other_handlers_and_an_extension_is_verified_with_both(run: Any, tmp_path: Path) -> None:
    """The extension's handlers are asked after those that replace, by the writer as by a reader, who adds it later."""
    core = ConnectorSettings.from_extra_config({"handlers": [SHY]}).core()
    log = starving_log(tmp_path, core)
    reader = composed_core([SHY]).reading(vocabulary_header(core), available_extensions())
    assert reader.handler_fingerprint() == core.handler_fingerprint()
    assert [type(each).__name__ for each in core.handlers[RequestState.RUNNING]] == ["Shy", "WatchingRunning"]
    result = run("verify", log, "--handlers", SHY)
    assert result.exit_code == 0, result.out


@pytest.mark.parametrize(
    ("extra_config", "message"),
    [
        ({"extensions": ["nowhere.at_all:Guard"]}, "extensions: 'nowhere.at_all:Guard': cannot be imported"),
        ({"extensions": ["os:path"]}, "extensions: 'os:path'"),
        ({"extensions": [NAMELESS]}, "extensions: extension Nameless: its name '' is not a valid name"),
        ({"extension_settings": {"starvation": {}}}, "starvation is not loaded"),
        (
            {"extensions": [GUARD], "extension_settings": {"starvation": {"limit": 3}}},
            "extension starvation has only the settings num_preemptions; remove limit, or correct its name",
        ),
        (
            {"extensions": [GUARD], "extension_settings": {"starvation": {"num_preemptions": "three"}}},
            "extension_settings.starvation.num_preemptions: 'three': must be int; write one such as 2",
        ),
    ],
)
def test_what_is_wrong_in_the_configuration_is_named(extra_config: dict[str, Any], message: str) -> None:
    """At start, when a person can still correct it."""
    with pytest.raises(ConfigurationError, match=message):
        ConnectorSettings.from_extra_config(extra_config).core()


@pytest.mark.parametrize("command", [("show", "a"), ("why", "a"), ("stats",)])
def test_a_log_that_was_written_without_an_extension_is_shown_with_it(
    run: Any, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """As `verify` takes it; one that cannot be imported is wrong usage."""
    log = starving_log(tmp_path, Core.standard())
    name, *request = command
    assert run(name, log, *request, "--extensions", GUARD).exit_code == 0
    refused = run(name, log, *request, "--extensions", "nowhere:Nothing")
    assert (refused.exit_code, "--extensions" in refused.err) == (64, True)
