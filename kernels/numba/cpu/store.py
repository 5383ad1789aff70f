"""Where the tokens of a row lie after a plan: bookkeeping of kvlab/cache/store.py, all heads at once.

Integer work of a few microseconds a head that would take milliseconds as NumPy calls on short arrays. Pages
of one (head, rung, segment) are kept full: those that hold the most staying tokens remain, staying tokens of
the others move into the holes, tokens that arrive fill the rest. This module moves no token; it returns lists
of moves.
"""

import numpy as np
from numba import njit

PAGE = 64


@njit(cache=True)
def place_row(tokens, stays, comers, table, num_pages, free, num_free, used, moves, places):
    """Decide where the tokens of one row lie, and rewrite its page table.

    tokens int64 (4, n): head, page, slot and rung of stored tokens, sorted by head, page and slot.
    stays bool (n,): whether a stored token keeps its rung.
    comers int64 (3, m): head, rung and segment of tokens that arrive.
    table int64 (4, heads, entries): rung, count, index and base, with room for the pages to come.
    num_pages int64 (heads,).
    free int64 (rungs, room), num_free and used int64 (rungs,): stacks of free pages, pages in use ever.
    moves int64 (5, n), out: rung, page and slot from, page and slot to; later ones may overwrite the origins
    of earlier ones, so they are carried out in order.
    places int64 (2, m), out: page and slot of every token that arrives.

    Return the number of moves.
    """
    entries, moved = table.shape[2], 0
    first = np.zeros(entries + 1, np.int64)
    held = np.zeros(entries, np.int64)
    rank = np.empty(entries, np.int64)
    token = 0
    for head in range(num_pages.size):
        pages = num_pages[head]
        rung, count, index, base = table[0, head], table[1, head], table[2, head], table[3, head]
        for page in range(pages):
            first[page], held[page] = token, 0
            while token < tokens.shape[1] and tokens[0, token] == head and tokens[1, token] == page:
                held[page] += stays[token]
                token += 1
        first[pages] = token
        end, last_segment = pages, np.int64(0)
        for page in range(pages):
            last_segment = max(last_segment, base[page])
        for comer in range(comers.shape[1]):
            last_segment = max(last_segment, comers[2, comer])
        for r in range(num_free.size):
            for segment in range(last_segment + 1):
                arriving = 0
                for comer in range(comers.shape[1]):
                    if comers[0, comer] == head and comers[1, comer] == r and comers[2, comer] == segment:
                        arriving += 1
                mine = np.flatnonzero((rung[:pages] == r) & (base[:pages] == segment))
                staying, before = 0, 0
                for page in mine:
                    staying += held[page]
                    before += count[page]
                if arriving == 0 and staying == before:
                    continue
                total = staying + arriving
                needed = (total + PAGE - 1) // PAGE
                last_count = total - PAGE * (needed - 1)
                kept = np.empty(needed, np.int64)
                ordered = mine[np.argsort(-held[mine], kind="mergesort")]
                for place in range(ordered.size):
                    page = ordered[place]
                    rank[page] = place
                    if place < needed:
                        kept[place] = index[page]
                        count[page] = PAGE if place < needed - 1 else last_count
                    else:
                        free[r, num_free[r]] = index[page]
                        num_free[r] += 1
                        count[page] = -1
                for place in range(ordered.size, needed):
                    if num_free[r] > 0:
                        num_free[r] -= 1
                        kept[place] = free[r, num_free[r]]
                    else:
                        kept[place] = used[r]
                        used[r] += 1
                    rung[end], base[end], index[end] = r, segment, kept[place]
                    count[end] = PAGE if place < needed - 1 else last_count
                    end += 1
                vacant = np.ones(total, np.bool_)
                for page in mine:
                    for t in range(first[page], first[page + 1]):
                        at = rank[page] * PAGE + tokens[2, t]
                        if stays[t] and at < total:
                            vacant[at] = False
                hole = 0
                for page in mine:
                    for t in range(first[page], first[page + 1]):
                        if stays[t] and rank[page] * PAGE + tokens[2, t] >= total:
                            while not vacant[hole]:
                                hole += 1
                            moves[0, moved] = r
                            moves[1, moved], moves[2, moved] = index[page], tokens[2, t]
                            moves[3, moved], moves[4, moved] = kept[hole // PAGE], hole % PAGE
                            moved += 1
                            hole += 1
                for comer in range(comers.shape[1]):
                    if comers[0, comer] == head and comers[1, comer] == r and comers[2, comer] == segment:
                        while not vacant[hole]:
                            hole += 1
                        places[0, comer], places[1, comer] = kept[hole // PAGE], hole % PAGE
                        hole += 1
        alive = 0
        for page in range(end):
            if count[page] >= 0:
                rung[alive], count[alive] = rung[page], count[page]
                index[alive], base[alive] = index[page], base[page]
                alive += 1
        num_pages[head] = alive
    return moved


@njit(cache=True)
def list_tokens(r, num_pages, rung, count, index, base, pool, record, tokens, code):
    """List the tokens that one row keeps at rung r, each at its place in the order of head, page and slot.

    num_pages (heads,); rung, count, index, base (heads, entries): the page table of the row.
    pool uint8 (bytes of all pages of the rung,); record: bytes of a page, and where in it positions
    (little-endian uint16) and importance codes begin.
    tokens int64 (5, n), out: head, page, slot, rung and position; code uint8 (n,), out.
    """
    nbytes, positions, importance = record
    at = 0
    for head in range(num_pages.size):
        for page in range(num_pages[head]):
            held = np.int64(count[head, page])
            if rung[head, page] == r:
                first = np.int64(index[head, page]) * nbytes
                segment = np.int64(base[head, page]) << 16
                for slot in range(held):
                    low = first + positions + 2 * slot
                    tokens[0, at + slot], tokens[1, at + slot], tokens[2, at + slot] = head, page, slot
                    tokens[3, at + slot] = r
                    tokens[4, at + slot] = segment + pool[low] + (np.int64(pool[low + 1]) << 8)
                    code[at + slot] = pool[first + importance + slot]
            at += held


@njit(cache=True)
def store_codes(r, head, page, slot, rung, index, pool, record, code):
    """Store importance codes, uint8 (n,), of those of the listed tokens that are at rung r.

    head, page, slot, rung int64 (n,); index (heads, entries) and the others as for `list_tokens`.
    """
    nbytes, _, importance = record
    for token in range(head.size):
        if rung[token] == r:
            at = np.int64(index[head[token], page[token]])
            pool[at * nbytes + importance + slot[token]] = code[token]
