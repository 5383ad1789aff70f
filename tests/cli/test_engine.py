"""`kvlab engine`: checks that pass and that fail, and text from the folder of a model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.engine import Decoder
from kvlab.lab.engine.text import words
from tests.engine.models import family


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app(), ["engine", *arguments])


@pytest.mark.parametrize("layer", ["1", "all"])
def test_layers_are_checked(layer: str) -> None:
    found = run("check", "--model", "pythia-14m", "--layer", layer, "--seq-len", "9", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["rows"]
    assert [row["layer"] for row in rows] == (["1"] if layer == "1" else [*"012345", "logits"])
    assert all(0 < row["ratio"] <= 1.1 for row in rows)


def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Decoder.layer_outputs

    def wrong(self: Decoder, ids: Any) -> Any:
        return [np.roll(x, 1, axis=0) for x in right(self, ids)]

    monkeypatch.setattr(Decoder, "layer_outputs", wrong)
    for command in (("check", "--layer", "0"), ("random-check", "--runs", "2")):
        found = run(*command, "--model", "pythia-14m", "--seq-len", "9")
        assert found.exit_code == 1, found.output
        assert "False" in found.stdout


def test_random_layers_are_checked() -> None:
    found = run("random-check", "--model", "pythia-14m", "--runs", "3", "--seq-len", "9", "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert 0 < values["minimum"] <= values["average"] <= values["maximum"] < 0.01


def test_text_of_a_folder(tmp_path: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(97)}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    plain.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path)
    model = family("llama")
    model.save_pretrained(tmp_path)
    found = run("generate", "--model", str(tmp_path), "--prompt", "w5 w6 w7", "--max-new-tokens", "6")
    assert found.exit_code == 0, found.output
    with torch.no_grad():
        want = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert found.stdout.strip() == "".join(f"w{token}" for token in want)


def test_characters_of_several_tokens_come_whole() -> None:
    class Bytes:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode(errors="replace")

    tokens = iter([[byte] for byte in "aé".encode()])
    assert list(words(Bytes(), tokens)) == ["a", "é"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--model", "pythia-3b"), "pythia-2.8b"),
        (("check", "--layer", "first"), "number of a layer"),
        (("check", "--layer", "6"), "layers 0 to 5"),
        (("generate", "--model", "/nowhere", "--prompt", "a"), "no folder"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert found.exit_code != 0
    assert message in found.output + str(found.exception)
