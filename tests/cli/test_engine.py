"""`kvlab engine`: checks that pass and that fail, and text from the folder of a model."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.engine import Decoder
from kvlab.lab.engine.check import check
from kvlab.lab.engine.text import Chat, words
from tests.engine.models import family


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app(), ["engine", *arguments])


@pytest.mark.parametrize("layer", ["1", "all"])
def test_layers_are_checked(layer: str) -> None:
    found = run("check", "--model", "pythia-14m", "--layer", layer, "--seq-len", "9", "--json")
    assert found.exit_code == 0, found.output
    assert found.stderr.startswith("pythia-14m: weights are drawn")
    rows = json.loads(found.stdout)["rows"]
    assert [row["layer"] for row in rows] == (["1"] if layer == "1" else [*"012345", "logits"])
    assert all(0 < row["ratio"] <= 1.1 for row in rows)


def test_what_layers_compute_is_dumped_and_timed(tmp_path: Any) -> None:
    kept = tmp_path / "kept.npz"
    options = ["--layer", "1", "--seq-len", "9", "--dump", str(kept), "--benchmark", "--num-runs", "3"]
    found = run("check", "--model", "pythia-14m", *options, "--json")
    assert found.exit_code == 0, found.output
    times = json.loads(found.stdout)["times"]
    assert [row["token of"] for row in times] == ["engine", "transformers"]
    assert all(0 < row["least us"] <= row["median us"] <= row["most us"] for row in times)
    with np.load(kept) as values:
        names = ("normed", "q", "k", "q_rotated", "k_rotated", "v", "attended", "out")
        assert sorted(values) == sorted(f"1.{name}" for name in names)
        assert values["1.normed"].shape == values["1.out"].shape == (9, 128)
        turned, straight = values["1.q_rotated"], values["1.q"]
    assert np.array_equal(turned[0], straight[0]), "position 0 does not turn"
    assert not np.array_equal(turned[1], straight[1])
    assert np.array_equal(turned[..., 8:], straight[..., 8:]), "a quarter of the channels turns"


def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Decoder.layer_outputs

    def wrong(self: Decoder, ids: Any) -> Any:
        return [np.roll(x, 1, axis=0) for x in right(self, ids)]

    monkeypatch.setattr(Decoder, "layer_outputs", wrong)
    for command in (("check", "--layer", "0"), ("random-check", "--runs", "2")):
        found = run(*command, "--model", "pythia-14m", "--seq-len", "9")
        assert found.exit_code == 1, found.output
        assert "False" in found.stdout


def test_a_text_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="seq_len=2000, 100 tokens timed behind them: the model takes 2048"):
        check("pythia-14m", layers=[0], seq_len=2000, dtype="float16", seed=0, device="cpu", runs=100)


def test_random_layers_are_checked() -> None:
    found = run("random-check", "--model", "pythia-14m", "--runs", "3", "--seq-len", "9", "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["random weights"]
    assert 0 < values["minimum"] < values["average"] < values["maximum"] < 0.01


@pytest.fixture
def folder(tmp_path: Any) -> Any:
    """A tiny model whose words are w0 to w96, with spaces between them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    plain.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path)
    family("llama").save_pretrained(tmp_path)
    return tmp_path


def test_the_layer_of_a_folder_is_not_called_random(folder: Any) -> None:
    found = run("random-check", "--model", str(folder), "--runs", "3", "--seq-len", "9")
    assert found.exit_code == 0, found.output
    assert "3 texts through the first layer" in found.stdout
    assert "random layers" not in found.stdout


def greedy(*ids: int) -> list[int]:
    with torch.no_grad():
        found = family("llama").generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    return found[0, len(ids) :].tolist()


def text_of(tokens: list[int]) -> str:
    """Of tokens that follow others."""
    return "".join(f" w{token}" for token in tokens)


def test_text_of_a_folder(folder: Any) -> None:
    found = run("generate", "--model", str(folder), "--prompt", "w5 w6 w7", "--max-new-tokens", "6")
    assert found.exit_code == 0, found.output
    assert found.stdout.rstrip("\n") == text_of(greedy(5, 6, 7))


def test_text_ends_where_the_settings_of_the_model_say(folder: Any) -> None:
    found = greedy(5, 6, 7)
    end = found[2]
    assert end not in found[:2]
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [96, end]}))
    said = run("generate", "--model", str(folder), "--prompt", "w5 w6 w7", "--max-new-tokens", "6")
    assert said.stdout.rstrip("\n") == text_of(found[:3])


TALK = """{% for one in messages %}{% if loop.first and one['role'] != 'system' %}w90 {% endif %}\
{{ {'user': 'w91', 'assistant': 'w92'}[one['role']] }} {{ one['content'] | trim }} w93 {% endfor %}\
{% if add_generation_prompt %}w92{% endif %}"""


@pytest.mark.parametrize("closes", [False, True])
def test_a_talk_has_the_form_of_the_model(folder: Any, closes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's words come once, and an answer is closed once, by the model or for it."""
    (folder / "chat_template.jinja").write_text(TALK)
    chat = Chat(str(folder), device="cpu", budget=None, max_seqlen=60)
    read: list[int] = []
    plain, said = chat._decoder.prefill, [[4, 5, 93 if closes else 6], [7]]

    def prefill(ids: Any) -> Any:
        read.extend(ids)
        return plain(ids)

    monkeypatch.setattr(chat._decoder, "prefill", prefill)
    monkeypatch.setattr(chat._decoder, "stream", lambda *_, **__: iter([[one] for one in said.pop(0)]))
    for line in ("w1 w2", "w3"):
        list(chat.answer(line, 5))
    first = [90, 91, 1, 2, 93, 92]
    unread = [] if closes else [6]  # 4 and 5 were read as they were made
    assert read == [*first, *unread, 93, 91, 3, 93, 92]


def test_a_talk_remembers_what_was_said(folder: Any) -> None:
    options = ["--temperature", "0", "--max-new-tokens", "6"]  # as many tokens as the model takes, 64
    written = folder / "talk.json"
    command = ["chat", str(folder), *options, "--output", str(written)]
    found = CliRunner().invoke(app(), command, input="w5 w6 w7\nw8 w9\n")
    assert found.exit_code == 0, found.output
    assert [turn["you"] for turn in json.loads(written.read_text())["turns"]] == ["w5 w6 w7", "w8 w9"]
    first = greedy(5, 6, 7)
    answers = [first, greedy(5, 6, 7, *first, 8, 9)]
    assert all(text_of(answer) in found.stdout for answer in answers)
    assert found.stdout.count("6 tokens") == 2
    assert "bits an element]" in found.stdout


def test_the_speed_of_an_answer_is_that_of_most_tokens(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token that is run waits for kernels to be compiled."""
    chat = Chat(str(folder), device="cpu", budget=None, max_seqlen=60)
    assert chat.summary().startswith("0 tokens; cache")
    clock = iter([100.0, 160.0, 160.25, 160.5])
    monkeypatch.setattr("kvlab.lab.engine.text.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(chat._decoder, "stream", lambda *_, **__: iter([[1], [2], [3], [4]]))
    list(chat.answer("w5 w6 w7", 4))
    assert chat.summary().startswith("4 tokens, 4.0 a second; cache")


def test_a_talk_with_random_weights() -> None:
    command = ["chat", "pythia-14m", "--budget", "0.5", "--max-new-tokens", "5", "--max-seqlen", "40"]
    found = CliRunner().invoke(app(), command, input="hello\n")
    assert found.exit_code == 0, found.output
    assert "5 tokens" in found.stdout
    assert "bits an element, in a block for the first 64 tokens" in found.stdout
    for option, value, said in (
        ("--budget", "a lot", "--budget 'a lot'"),
        ("--budget", "0.01", "Raise --budget"),
        ("--max-seqlen", "5000", "--max-seqlen 5000: .* take --max-seqlen 2048"),
        ("--device", "tpu", "--device 'tpu'"),
    ):
        wrong = CliRunner().invoke(app(), ["chat", "pythia-14m", option, value], input="hello\n")
        assert re.search(said, str(wrong.exception))
    nothing = CliRunner().invoke(app(), ["chat", "a.gguf"])
    assert "MODEL 'a.gguf' is in GGUF" in str(nothing.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", " "), "--prompt ' ' has no token"),
        (("--max-new-tokens", "64"), "has 2 tokens and --max-new-tokens 64 .* takes, 64 in all; shorten"),
        (("--budget", "a lot"), "--budget 'a lot'"),
        (("--budget", "0.01"), "Raise --budget"),
        (("--temperature", "inf"), "--temperature inf"),
    ],
)
def test_refusals_name_the_option(
    folder: Any, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0.01" not in options:  # which only the cache can judge
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    found = run("generate", "--model", str(folder), "--prompt", "w5 w6", "--max-new-tokens", "4", *options)
    assert re.search(message, str(found.exception))


def test_text_fills_the_model(folder: Any) -> None:
    found = run("generate", "--model", str(folder), "--prompt", "w5 w6", "--max-new-tokens", "63")
    assert found.exit_code == 0, found.output


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Any) -> None:
    family("llama").save_pretrained(tmp_path)
    found = run("generate", "--model", str(tmp_path), "--prompt", "a")
    assert re.search("--model .* without a tokenizer.*'hf download NAME'", str(found.exception))


def test_an_end_beyond_the_vocabulary_is_none(folder: Any) -> None:
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [96, 5000]}))
    found = run("generate", "--model", str(folder), "--prompt", "w5 w6 w7", "--max-new-tokens", "6")
    assert found.exit_code == 0, found.output


def test_a_line_below_the_answer_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    command = ["chat", "pythia-14m", "--max-new-tokens", "5", "--max-seqlen", "40"]
    found = CliRunner().invoke(app(), command, input="hello\n")
    assert found.exit_code == 0, found.output
    assert "5 tokens" in found.stdout


def test_a_token_is_profiled() -> None:
    found = CliRunner().invoke(app(), ["profile", "engine", "--device", "cpu", "--iterations", "2", "--json"])
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["rows"]
    assert row["call"] == "token, plan graph"
    assert row["shape"] == "pythia-14m, 6 layers, 1 row behind 500 tokens"
    assert row["ms"] > 0


def test_a_talk_ends_where_it_is_as_long_as_it_may_be(folder: Any) -> None:
    found = CliRunner().invoke(app(), ["chat", str(folder), "--max-seqlen", "4"], input="w1 w2\nw3 w4\n")
    assert found.exit_code == 1
    assert "--max-seqlen 4: the talk has" in str(found.exception)


def test_characters_of_several_tokens_come_whole() -> None:
    class Bytes:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode(errors="replace")

    text = "aé" * 6  # of 18 tokens, more than are looked back at
    for before in ("", "b", "ü", "üüüüüüüü"):
        tokens = iter([[byte] for byte in text.encode()])
        assert list(words(Bytes(), tokens, list(before.encode()))) == list(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--model", "pythia-3b"), "pythia-2.8b"),
        (("check", "--layer", "first"), "number of a layer"),
        (("check", "--layer", "6"), "layers 0 to 5"),
        (("check", "--layer", "6"), "--layer 6"),
        (("check", "--seq-len", "3000"), "--seq-len 3000: the model takes 2048"),
        (("check", "--model", "a.gguf"), "--model 'a.gguf' is in GGUF"),
        (("check", "--device", "tpu"), "--device 'tpu'"),
        (("check", "--dump", "/nowhere/x.npz"), "--dump /nowhere/x.npz: No such file or directory"),
        (("check", "--output", "/"), "--output /: Is a folder"),
        (("random-check", "--seq-len", "3000"), "--seq-len 3000"),
        (("random-check", "--seed", "-1"), "--seed"),
        (("generate", "--model", "/nowhere", "--prompt", "a"), "--model '/nowhere' is no folder"),
        (("generate", "--model", "a.gguf", "--prompt", "a"), "--model 'a.gguf' is in GGUF"),
        (("generate", "--model", "pythia-14m", "--prompt", "a"), "'kvlab chat' talks"),
        (("generate", "--model", "nobody/has-it", "--prompt", "a"), "'hf download NAME'"),
        (("check", "--model", "nobody/has-it"), "'hf download NAME'"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert found.exit_code != 0
    assert message in found.output + str(found.exception)
