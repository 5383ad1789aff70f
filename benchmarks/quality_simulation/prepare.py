"""Write what `run.py` reads: tokens of windows, haystacks and questions, and the model's weight file.

    python benchmarks/quality_simulation/prepare.py FOLDER TEXTS

TEXTS is a folder with alice29.txt, asyoulik.txt, lcet10.txt and plrabn12.txt: `tests/testdata` of
brotli's source distribution (1.2.0 on PyPI). The fifth text, the Bible, and the model are those of `make
demo`. Ten windows of 1,281 tokens, two a text; 20 haystacks of 1,536 tokens with ten late questions
each.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
from transformers import AutoTokenizer

from kvlab.lab.quality.model import SMOLLM2_FILE, require_smollm2
from kvlab.lab.quality.text import read_book

WINDOW, HAYSTACK = 1024 + 256 + 1, 1536
NEEDLES = 10  # a haystack
FILES = ("alice29", "asyoulik", "lcet10", "plrabn12")
_SPELLED = """
Alder Birch Cedar Dogwood Elder Fennel Gorse Hazel Ivory Juniper Kestrel Laurel Maple Nettle Oakley Poplar
Quince Rowan Sorrel Thorne Umber Vetch Willow Yarrow Abbot Barker Cooper Draper Ellis Fisher Glover Harper
Irving Jarvis Keeler Lorimer Mercer Norris Osborne Porter Quigley Ryder Sawyer Tanner Usher Vickers Weaver
Yates Ashby Bolton Corby Denton Elmore Farley Grimsby Holton Ilford Jessop Kirby Langley
"""
PEOPLE = _SPELLED.split()


def read_texts(folder: Path) -> dict[str, str]:
    """Five texts; paragraphs of those with hard line breaks become one line."""
    texts = {n: (folder / f"{n}.txt").read_text(errors="replace").replace("\r\n", "\n") for n in FILES}
    for name in ("alice29", "lcet10"):
        texts[name] = re.sub(r"(?<!\n)\n(?!\n)[ \t]*", " ", texts[name])
    return {**texts, "bible": read_book()}


def cut(encode, text, fraction, length):
    """Tokens behind the first line break after a fraction of the text."""
    begin = text.find("\n", int(len(text) * fraction)) + 1
    tokens = encode(text[begin : begin + 12 * length])
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens behind {fraction:g} of it; {length} are needed")
    return tokens[:length]


def haystacks(encode, texts):
    """20 haystacks, and 200 questions as (tokens that ask, tokens that answer, depth)."""
    rng = np.random.default_rng(7)
    stacks, questions = [], []
    for g in range(20):
        who = rng.choice(PEOPLE, NEEDLES, replace=False)
        numbers = ["".join(map(str, rng.integers(0, 10, 5))) for _ in who]
        pairs = list(zip(who, numbers, strict=True))
        needles = [encode(f" The locker number of {w} is {x}.") for w, x in pairs]
        text, fraction = list(texts.values())[g % 5], 0.05 + 0.2 * (g // 5) + 0.013 * g
        body = cut(encode, text, fraction, HAYSTACK - sum(map(len, needles)))
        tokens, last = [], 0
        for i, needle in enumerate(needles):
            at = int(len(body) * (0.03 + 0.94 * (i + 0.5) / NEEDLES))
            tokens += body[last:at] + needle
            last = at
        stacks.append(tokens + body[last:])
        for i, (w, x) in enumerate(pairs):
            ask = f"\n\nQuestion: What is the locker number of {w}? Answer: The locker number of {w} is"
            questions.append((encode(ask), encode(f" {x}"), i / (NEEDLES - 1)))
    return stacks, questions


def main() -> None:
    folder, source = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    model = require_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(model, gguf_file=SMOLLM2_FILE, local_files_only=True)

    def encode(text):
        return list(tokenizer(text, verbose=False)["input_ids"])

    texts = read_texts(source)
    places = [(name, fraction) for name in texts for fraction in (0.12, 0.57)]
    stacks, questions = haystacks(encode, texts)
    table = np.zeros((len(questions), max(len(q) + len(a) for q, a, _ in questions)), np.int32)
    for row, (ask, answer, _) in zip(table, questions, strict=True):
        row[: len(ask) + len(answer)] = ask + answer
    np.savez_compressed(
        folder / "data.npz",
        windows=np.array([cut(encode, texts[n], f, WINDOW) for n, f in places], np.int32),
        names=np.array([f"{n}@{f}" for n, f in places]),
        stacks=np.array(stacks, np.int32),
        qt=table,
        ql=np.array([len(q) + len(a) for q, a, _ in questions], np.int32),
        al=np.array([len(a) for _, a, _ in questions], np.int32),
        depth=np.array([d for _, _, d in questions]),
    )
    index = {
        t.name: [t.tensor_type.name, [int(x) for x in t.shape][::-1], int(t.data_offset), int(t.n_bytes)]
        for t in gguf.GGUFReader(model / SMOLLM2_FILE).tensors
    }
    (folder / "index.json").write_text(json.dumps(index))
    shutil.copy(model / SMOLLM2_FILE, folder / "model.gguf")


if __name__ == "__main__":
    main()
