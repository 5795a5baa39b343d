"""Reading options: spellings, sources and their order, and mistakes people make."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from launcher.options import table as o
from launcher.options.given import CommandLine, resolve, resolve_again, split


def read(*argv: str, **environ: str) -> CommandLine:
    return resolve(argv, environ)


# ---- argv --------------------------------------------------------------------------------


def test_everything_after_the_command_belongs_to_it() -> None:
    line = read("-np", "2", "train.py", "--min-np", "9", "-v", "--", "x")
    assert line.command == ("train.py", "--min-np", "9", "-v", "--", "x")
    assert line["num_proc"] == 2
    assert line["min_np"] is None
    assert not line["verbose"]


def test_two_dashes_end_the_options_and_are_not_part_of_the_command() -> None:
    assert read("-np", "2", "--", "-strange-program", "a").command == ("-strange-program", "a")


def test_a_module_is_a_command() -> None:
    assert read("-np", "2", "-m", "pkg.train", "-m", "x").command == ("-m", "pkg.train", "-m", "x")


@pytest.mark.parametrize("spelling", ["--min-np", "--min_np", "--min-num-proc", "--min_num-proc"])
def test_hyphens_underscores_and_aliases_are_the_same_option(spelling: str) -> None:
    assert read(spelling, "3")["min_np"] == 3
    assert read(f"{spelling}=3")["min_np"] == 3


@pytest.mark.parametrize(
    "argv", [["-np", "4"], ["-np=4"], ["-np4"], ["-n", "4"], ["--num-proc=4"], ["--num_proc", "4"]]
)
def test_the_number_of_workers_in_every_spelling(argv: list[str]) -> None:
    assert read(*argv)["num_proc"] == 4


def test_the_last_of_two_equal_options_wins() -> None:
    assert read("-np", "2", "-np", "3")["num_proc"] == 3


def test_variables_add_up_and_a_later_one_replaces_an_earlier() -> None:
    line = read("--env", "A=1", "-x", "B=x=y", "--env", "A=2", "--env=C=")
    assert dict(line["env"]) == {"A": "2", "B": "x=y", "C": ""}


def test_lists_of_names_add_up() -> None:
    line = read("--network-interface", "eth0", "--network-interfaces=eth1,eth2", "--nics", "ib0")
    assert line["network_interfaces"] == ("eth0", "eth1", "eth2", "ib0")
    assert resolve_again(line.words, {})["network_interfaces"] == line["network_interfaces"]


def test_a_list_of_names_on_the_command_line_replaces_that_of_the_environment() -> None:
    line = read("--nics", "eth0", ELASTICRUN_NETWORK_INTERFACES="eth1")
    assert line["network_interfaces"] == ("eth0",)


def test_an_option_of_two_words_takes_both() -> None:
    assert read("--blacklist-cooldown-range", "5", "60", "x")["blacklist_cooldown"] == (5.0, 60.0)
    attached = read("--blacklist-cooldown-range=5,60")
    assert attached["blacklist_cooldown"] == (5.0, 60.0)


def test_every_spelling_in_the_table_is_unique() -> None:
    spellings = [s for option in o.OPTIONS for s in (option.long, *option.aliases)]
    assert len(spellings) == len(set(spellings))
    foreign, needless = set(o.FOREIGN), set(o.NEEDLESS)
    assert not (foreign | needless) & set(spellings)
    assert not foreign & needless
    assert set(o.PET_OPTIONS) <= set(spellings)


def test_what_a_torchrun_or_mpirun_command_says_in_vain_is_passed_over_with_a_remark() -> None:
    line = read(
        *("--monitor_interval", "0.1", "--role=trainer", "--nproc-per-node=2", "--tag-output"),
        *("--no-python", "./prog", "--role", "x"),
    )
    assert line["nproc_per_node"] == 2
    assert line.command == ("./prog", "--role", "x")
    assert line.warnings[0] == ("--monitor-interval is ignored: a worker's end is noticed at once")
    assert len(line.warnings) == 4


def test_torchruns_long_word_for_a_module() -> None:
    assert read("--module", "pkg.train", "--module").command == ("-m", "pkg.train", "--module")


# ---- mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--min-npp", "2"], "unknown option --min-npp; did you mean --min-np?"),
        (["--xyzzy"], "unknown option --xyzzy; see elasticrun --help"),
        (["--rdzv-conf=x"], "--rdzv-conf needs KEY=VALUE,…, got 'x'"),
        (["--rdzv-conf=timeout=x"], "--start-timeout needs a number of seconds, more than 0"),
        (["--jsrun"], "--jsrun does not exist here; it starts processes by MPI"),
        (["--rdzv-backend="], "--rdzv-backend needs a value that is not empty"),
        (["--min-np"], "--min-np needs a whole number of at least 1, got 'train.py'"),
        (["--min-np", "--max-np", "4"], "--min-np needs a value: --min-np N"),
        (["--min-np", "x"], "--min-np needs a whole number of at least 1, got 'x'"),
        (["--min-np", "0"], "--min-np needs a whole number of at least 1, got '0'"),
        (["--min-np=-1"], "--min-np needs a whole number of at least 1, got '-1'"),
        (["--min-np", "2.5"], "--min-np needs a whole number of at least 1, got '2.5'"),
        (["--min-np", "²"], "--min-np needs a whole number"),
        (["--start-timeout", "soon"], "--start-timeout needs a number of seconds, more than 0"),
        (["--start-timeout", "nan"], "--start-timeout needs a number of seconds"),
        (["--start-timeout", "inf"], "--start-timeout needs a number of seconds"),
        (["--start-timeout", "0"], "--start-timeout needs a number of seconds, more than 0"),
        (["--grace-period=-1"], "--grace-period needs a number of seconds, 0 or more"),
        (["--nnodes", "4:2"], "--nnodes needs 1 <= MIN <= MAX, got 4:2"),
        (["--nnodes", "0"], "--nnodes needs 1 <= MIN <= MAX, got 0"),
        (["--nnodes", "a"], "--nnodes needs N or MIN:MAX, got 'a'"),
        (["--nproc-per-node", "all"], "--nproc-per-node needs a whole number of at least 1, auto"),
        (["--blacklist-cooldown-range", "9", "3"], "needs MIN <= MAX, got 9 3"),
        (["--blacklist-cooldown-range", "9"], "needs a number of seconds, more than 0, got 'train"),
        (["--limit", "keys=1"], "--limit knows reserve, unproven, "),
        (["--limit", "head_s=0"], "--limit needs head_s=N with a number of seconds above 0, got"),
        (["--env", "1A"], "--env needs NAME=VALUE or NAME, got '1A'"),
        (["--env", "1A=2"], "--env needs NAME=VALUE or NAME, got '1A=2'"),
        (["--log-format", "xml"], "--log-format is one of text, json, got 'xml'"),
        (["--tee", "4"], "--tee is 0 (none), 1 (stdout), 2 (stderr), 3 (both)"),
        (["--rdzv-endpoint", "h:70000"], "--rdzv-endpoint needs HOST:PORT"),
        (["--rdzv-endpoint", "host:abc"], "--rdzv-endpoint needs HOST:PORT"),
        (["--local-ranks-filter", "0,x"], "--local-ranks-filter needs a whole number"),
        (["--run-id", ""], "--run-id needs a value that is not empty"),
        (["--standalone=maybe"], "--standalone is a switch: true or false, got 'maybe'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(*argv, "train.py")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 64


def test_an_option_at_the_end_needs_its_value() -> None:
    with pytest.raises(UsageError, match="--min-np needs a value: --min-np N"):
        read("--min-np")


def test_splitting_ignores_what_the_values_are() -> None:
    given, command, remarks = split(["-H", "a:1", "x"])
    assert {option.name: words for option, words in given.items()} == {"hosts": ("a:1",)}
    assert command == ("x",)
    assert remarks == ()


# ---- sources -----------------------------------------------------------------------------


def config(folder: Path, text: str) -> str:
    path = folder / "job.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = config(tmp_path, "min-np: 2\nmax_np: 8\nstart-timeout: 60\n")
    line = read(
        *("--config-file", file, "--min-np", "4"),
        ELASTICRUN_MIN_NP="3",
        ELASTICRUN_MAX_NP="9",
    )
    assert (line["min_np"], line["max_np"], line["start_timeout"]) == (4, 9, 60.0)
    assert line.settings["min_np"].source == "command line"
    assert line.settings["max_np"].source == "ELASTICRUN_MAX_NP"
    assert line.settings["start_timeout"].source == f"{file} line 3"
    assert line.settings["elastic_timeout"].source == "default"
    assert ("--max-np", "9", "ELASTICRUN_MAX_NP") in line.origins()


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    line = read(ELASTICRUN_CONFIG_FILE=config(tmp_path, "min-np: 2"))
    assert line["min_np"] == 2


def test_values_of_a_file_mean_what_stands_there_and_not_what_yaml_makes_of_it(
    tmp_path: Path,
) -> None:
    file = config(
        tmp_path,
        "nnodes: 1:4\n"  # 64 to YAML 1.1
        "run-id: 1e3\n"  # 1000.0
        "hosts: [a:1, b:2]\n"
        "verbose: yes\n"
        "blacklist-cooldown-range: [5, 60]\n"
        "env:\n  NCCL_DEBUG: INFO\n  COLOUR: no\n",
    )
    line = read("--config-file", file)
    assert line["nnodes"] == (1, 4)
    assert line["run_id"] == "1e3"
    assert line["hosts"] == "a:1,b:2"
    assert line["verbose"] is True
    assert line["blacklist_cooldown"] == (5.0, 60.0)
    assert dict(line["env"]) == {"NCCL_DEBUG": "INFO", "COLOUR": "no"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min-npp: 2", "line 1: 'min-npp' is not an option; did you mean min-np?"),
        ("\nmin-np: x", "line 2: --min-np needs a whole number"),
        ("min-np: 2\nmin_np: 3", "line 2: 'min_np' is given twice"),
        ("min-np:", "--min-np needs a whole number"),
        ("min-np: {a: [1]}", "expected a plain value, found a nested one"),
        ("[1, 2]", "expected lines such as 'min-np: 2'"),
        ("just text", "expected lines such as 'min-np: 2'"),
        ("a: [1", "not YAML"),
        ("min-np: [1, 2]", "--min-np needs a whole number of at least 1, got '1,2'"),
        ("min-np: !!python/object/apply:os.system ['true']", "--min-np"),
        ("a: \x00", "not YAML"),
    ],
)
def test_a_mistake_in_the_file_names_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    file = config(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read("--config-file", file)
    assert said in str(caught.value)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read("--config-file", config(tmp_path, "# nothing\n"))["min_np"] is None


def test_a_file_that_is_missing_or_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read("--config-file", str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match="Is a directory"):
        read("--config-file", str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read("--config-file", str(tmp_path / "bytes"))


def test_a_variable_that_cannot_be_read_is_named() -> None:
    with pytest.raises(UsageError, match="ELASTICRUN_MIN_NP: --min-np needs"):
        read(ELASTICRUN_MIN_NP="many")
    with pytest.raises(UsageError, match="ELASTICRUN_ENV"):
        read(ELASTICRUN_ENV="A='1")


def test_a_switch_and_a_list_of_variables_in_the_environment() -> None:
    line = read(ELASTICRUN_STANDALONE="1", ELASTICRUN_QUIET="no", ELASTICRUN_ENV="A=1 'B=x y'")
    assert line["standalone"] is True
    assert line["quiet"] is False
    assert dict(line["env"]) == {"A": "1", "B": "x y"}


def test_the_comparison_of_states_is_switched_off_by_every_kind_of_source(tmp_path: Path) -> None:
    assert read("x.py")["verify_state"]
    assert not read("--no-verify-state", "x.py")["verify_state"]
    assert read("--no-verify-state", "--verify-state", "x.py")["verify_state"], "the last one wins"
    assert not read("x.py", ELASTICRUN_VERIFY_STATE="0")["verify_state"]
    for text in ("verify-state: false", "no_verify_state: true"):
        assert not read("--config-file", config(tmp_path, text), "x.py")["verify_state"]
    off = read("--no-verify-state", "x.py")
    assert off.words == ("--verify-state=false", "--", "x.py")
    assert not resolve_again(off.words, {})["verify_state"]


def test_what_follows_from_a_difference_is_one_of_three() -> None:
    assert read("x.py")["on_difference"] is None
    assert read("--on-difference", "warn", "x.py")["on_difference"] == "warn"
    with pytest.raises(UsageError, match="--on-difference is one of stop, repair, warn"):
        read("--on-difference", "ignore", "x.py")


def test_torchruns_variables_count_and_ours_win_over_them() -> None:
    line = read(PET_NNODES="1:3", PET_RDZV_ID="job7", PET_NPROC_PER_NODE="4", PET_ROLE="x")
    assert line["nnodes"] == (1, 3)
    assert line["run_id"] == "job7"
    assert line.settings["nproc_per_node"].source == "PET_NPROC_PER_NODE"
    line = read("--tee=3", PET_NNODES="1:3", ELASTICRUN_NNODES="2:2", PET_TEE="1")
    assert line["nnodes"] == (2, 2)
    assert line["tee"] == "3"


def test_a_misspelt_variable_is_remarked_on_and_does_not_end_anything() -> None:
    line = read(ELASTICRUN_MINNP="2")
    assert line.warnings == (
        "the environment variable ELASTICRUN_MINNP sets no option; did you mean ELASTICRUN_MIN_NP?",
    )


def test_secret_variables_are_shown_by_name_only() -> None:
    origins = read("--env", "API_KEY=hunter2").origins()
    assert origins == (("--env", "API_KEY", "command line"),)


# ---- a command line that is read again ---------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["-np", "2", "train.py", "-v"], {}),
        (["--blacklist_cooldown_range", "5", "60", "-v", "-m", "pkg.train"], {}),
        (["-x", "A=1", "--env", "B", "--tee=1", "./a.out"], {"ELASTICRUN_MIN_NP": "2"}),
        (["-np", "4", "train.py"], {"PET_NNODES": "1", "ELASTICRUN_ENV": "A='1 2' B"}),
        (["--rdzv-conf", "timeout=9", "--", "-strange"], {"PET_RDZV_CONF": "join_timeout=7"}),
        (["-H", "a:1,b:2", "--version"], {"ELASTICRUN_QUIET": "yes"}),
        (["--limit", "store_keys=5", "--limit=head_s=2", "a.py"], {}),
        (["a.py"], {"ELASTICRUN_LIMIT": "store_keys=5 users_keys=4"}),
    ],
)
def test_a_command_line_is_the_same_when_its_words_are_read_in_another_environment(
    argv: list[str], environ: dict[str, str]
) -> None:
    first = resolve(argv, environ)
    again = resolve_again(first.words, {"ELASTICRUN_NP": "9", "PET_NNODES": "7", "HOME": "/h"})
    assert (again.settings, again.command) == (first.settings, first.command)
    assert again.words == first.words


def test_two_spellings_of_a_command_line_have_the_same_words() -> None:
    assert (
        read("-np", "2", "--min_np=1", "a.py").words
        == read("--min-np", "1", "-n2", "--", "a.py").words
    )
    assert read("-np", "2", "a.py").words != read("-np", "3", "a.py").words


def test_values_named_like_secrets_are_no_part_of_the_words_that_the_journal_keeps() -> None:
    environ = {"ELASTICRUN_ENV": "DB_PASSWORD=abc 'A=1 2'"}
    line = resolve(["-x", "HF_TOKEN=abc", "-x", "B=2", "-np=2", "a.py"], environ)
    assert dict(line["env"]) == {"HF_TOKEN": "abc", "B": "2"}
    assert "abc" not in " ".join(line.words)
    assert "--env=HF_TOKEN" in line.words
    assert "ELASTICRUN_ENV=DB_PASSWORD 'A=1 2'" in line.words
    again = resolve(["-x", "HF_TOKEN=new", "-x", "B=2", "-np=2", "a.py"], environ)
    assert again.words == line.words, "a job goes on also with another secret"


def test_whether_the_job_is_resumed_is_no_part_of_the_words() -> None:
    assert read("--resume", "a.py", ELASTICRUN_RESUME="1").words == read("a.py").words
