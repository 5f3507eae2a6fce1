"""Requests to the processes that keep slots on other nodes, and their replies, in JSON.

Nodes that do not answer are left out: what their ranks held may be on their buddies' nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter

from kempner.checkpoint.slots.memory import Board, CopyHolder, SlotHolder
from kempner.checkpoint.slots.pour import Offer, Poured, offers, pour
from kempner.run.process.durable_io import as_names, as_text

Ask: TypeAlias = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Takes the texts of requests, by node, and returns those of the replies that came."""


@dataclass(frozen=True)
class SlotRequest:
    """What the slots offer of the attempt with this `nonce`; with a `folder`, pour its `step` from
    the slots of some ranks, and from copies of others. With `listen`, where copies are listened
    for: on the network `interface` if one is named."""

    nonce: str = ""
    step: int = 0
    folder: str = ""
    own: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    listen: bool = False
    interface: str = ""


@dataclass(frozen=True)
class SlotReply:
    """What was asked for; or `why` it failed, with its error number."""

    offers: tuple[Offer, ...] = ()
    poured: tuple[Poured, ...] = ()
    address: str = ""
    port: int = 0
    since: int = 0
    error: int = 0
    why: str = ""


_REQUEST, _REPLY = TypeAdapter(SlotRequest), TypeAdapter(SlotReply)


@dataclass(frozen=True)
class SlotKeeper:
    """What a node keeps: its ranks' slots, and copies for others; `listen` says where those are
    listened for, and begins to."""

    own: SlotHolder
    copies: CopyHolder
    listen: Callable[[str], tuple[str, int]]


def listening(ask: Ask, nodes: Iterable[str], interface: str) -> dict[str, tuple[str, int]]:
    """Where these nodes listen for copies, of those that do. Raises `OSError`."""
    replies = _replies(ask, dict.fromkeys(nodes, SlotRequest(listen=True, interface=interface)))
    return {node: (told.address, told.port) for node, told in replies.items() if told.port}


def offers_of(ask: Ask, nodes: Iterable[str], nonce: str) -> dict[str, tuple[Offer, ...]]:
    """What these nodes offer; nothing from before the run went back, as far as one knows of it.
    Raises `OSError`."""
    replies = _replies(ask, dict.fromkeys(nodes, SlotRequest(nonce)))
    since = max((told.since for told in replies.values()), default=0)
    return {
        node: tuple(offer for offer in told.offers if offer.since >= since)
        for node, told in replies.items()
    }


def poured_by(
    ask: Ask, offered: Mapping[str, Iterable[Offer]], nonce: str, step: int, folder: Path
) -> list[Poured]:
    """Have the nodes write what they have `offered` of a step into a folder; a copy only where no
    node has its original, or that node cannot write. Raises `OSError` if no node can."""
    held = {node: [offer for offer in told if offer.step == step] for node, told in offered.items()}
    left = {offer.rank for told in held.values() for offer in told}
    request = SlotRequest(nonce, step, str(folder.absolute()))
    poured: list[Poured] = []
    while left:
        shares = shares_of(held, left, request)
        replies = _ask_all(ask, shares)
        for reply in replies.values():
            poured += reply.poured
        left -= {each.rank for each in poured}
        failed = [node for node in shares if node not in replies or replies[node].why]
        held = {node: told for node, told in held.items() if node not in failed}
        if not failed:
            break  # some slots may be gone; the caller sees that from what it gets
        if not left <= {offer.rank for told in held.values() for offer in told}:
            raise _error(replies.get(failed[0]))
    return poured


def shares_of(
    held: Mapping[str, Iterable[Offer]], ranks: Collection[int], request: SlotRequest
) -> dict[str, SlotRequest]:
    """The request with what each node is to pour: each rank once, its original if that is held."""
    chosen: dict[int, tuple[str, Offer]] = {}
    for node, told in held.items():
        for offer in told:
            if offer.rank in ranks and (offer.rank not in chosen or not offer.copied):
                chosen[offer.rank] = node, offer
    own, copies = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for rank, (node, offer) in chosen.items():
        (copies if offer.copied else own)[node].append(rank)
    return {
        node: replace(request, own=tuple(own[node]), copies=tuple(copies[node]))
        for node in {*own, *copies}
    }


def reply_text(keeper: SlotKeeper, request: str) -> str:
    """The text that replies to that of a request; nothing to none."""
    if not request:
        return ""
    asked = as_names(_REQUEST.validate_json(request))
    return _REPLY.dump_json(as_text(_reply(keeper, asked))).decode()


def _replies(ask: Ask, requests: Mapping[str, SlotRequest]) -> dict[str, SlotReply]:
    replies = _ask_all(ask, requests)
    for reply in replies.values():
        if reply.why:
            raise _error(reply)
    return replies


def _ask_all(ask: Ask, requests: Mapping[str, SlotRequest]) -> dict[str, SlotReply]:
    texts = ask(
        {node: _REQUEST.dump_json(as_text(request)).decode() for node, request in requests.items()}
    )
    return {node: _REPLY.validate_json(text) for node, text in texts.items() if text}


def _error(reply: SlotReply | None) -> OSError:
    if reply is None:
        return TimeoutError("a node that holds a part of it does not answer any more")
    return OSError(reply.error, reply.why)


def _reply(keeper: SlotKeeper, asked: SlotRequest) -> SlotReply:
    own, copies = keeper.own, keeper.copies
    try:
        if asked.listen:
            address, port = keeper.listen(asked.interface)
            return SlotReply(address=address, port=port)
        if not asked.folder:
            held = *offers(own, asked.nonce), *offers(copies, asked.nonce, copied=True)
            since = max((Board(board).since for board in own.boards()), default=0)
            return SlotReply(offers=held, since=since)
        folder = Path(asked.folder)
        poured = pour(own, asked.nonce, asked.step, folder, asked.own)
        poured += pour(copies, asked.nonce, asked.step, folder, asked.copies, instead=True)
        return SlotReply(poured=tuple(poured))
    except OSError as error:
        return SlotReply(error=error.errno or 0, why=error.strerror or str(error))
