"""Requests to the processes that keep slots on other nodes, and their replies, in JSON.

Nodes that do not answer are skipped: copies of their ranks' slots may be on their buddy nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from kempner.checkpoint.slots.memory import Board, CopyHolder, SlotHolder
from kempner.checkpoint.slots.pour import Offer, Poured, offers, pour
from kempner.run.process.durable_io import adapter_of, as_names, as_text

Ask: TypeAlias = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Sends request texts, by node, and returns the texts of the replies."""


@dataclass(frozen=True)
class SlotRequest:
    """Ask for the steps that the slots hold of the attempt with this `nonce`. With a `folder`:
    write its `step` there, from the slots of the ranks `own` and the copies of the ranks `copies`.
    With `listen`: start to listen for copies, on the network `interface` if given."""

    nonce: str = ""
    step: int = 0
    folder: str = ""
    own: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    listen: bool = False
    interface: str = ""


@dataclass(frozen=True)
class SlotReply:
    """The result, or `why` the request failed, with the error number."""

    offers: tuple[Offer, ...] = ()
    poured: tuple[Poured, ...] = ()
    address: str = ""
    port: int = 0
    since: int = 0
    error: int = 0
    why: str = ""


@dataclass(frozen=True)
class SlotKeeper:
    """The slots of a node's ranks, and copies for other nodes; `listen` starts to listen for copies
    and returns the address and port."""

    own: SlotHolder
    copies: CopyHolder
    listen: Callable[[str], tuple[str, int]]


def listening(ask: Ask, nodes: Iterable[str], interface: str) -> dict[str, tuple[str, int]]:
    """Addresses and ports of the nodes that listen for copies. Raises `OSError`."""
    replies = _replies(ask, dict.fromkeys(nodes, SlotRequest(listen=True, interface=interface)))
    return {node: (reply.address, reply.port) for node, reply in replies.items() if reply.port}


def offers_of(ask: Ask, nodes: Iterable[str], nonce: str) -> dict[str, tuple[Offer, ...]]:
    """The steps that these nodes hold, without those from before the last rollback that any of them
    knows. Raises `OSError`."""
    replies = _replies(ask, dict.fromkeys(nodes, SlotRequest(nonce)))
    since = max((reply.since for reply in replies.values()), default=0)
    return {
        node: tuple(offer for offer in reply.offers if offer.since >= since)
        for node, reply in replies.items()
    }


def poured_by(
    ask: Ask, offered: Mapping[str, Iterable[Offer]], nonce: str, step: int, folder: Path
) -> list[Poured]:
    """Have the nodes write their parts of a step, which they have `offered`, into `folder`; a copy
    only if no node has the original or that node fails to write it. Raises `OSError` if a part
    cannot be written by any."""
    held = {node: [o for o in of_node if o.step == step] for node, of_node in offered.items()}
    left = {offer.rank for of_node in held.values() for offer in of_node}
    request = SlotRequest(nonce, step, str(folder.absolute()))
    poured: list[Poured] = []
    while left:
        shares = shares_of(held, left, request)
        replies = _ask_all(ask, shares)
        for reply in replies.values():
            poured += reply.poured
        left -= {each.rank for each in poured}
        failed = [node for node in shares if node not in replies or replies[node].why]
        held = {node: of_node for node, of_node in held.items() if node not in failed}
        if not failed:
            break  # some slots may be gone, as the caller sees from the result
        if not left <= {offer.rank for of_node in held.values() for offer in of_node}:
            raise _error(replies.get(failed[0]))
    return poured


def shares_of(
    held: Mapping[str, Iterable[Offer]], ranks: Collection[int], request: SlotRequest
) -> dict[str, SlotRequest]:
    """The requests for each node: each rank is written once, from its original if a node holds
    it."""
    chosen: dict[int, tuple[str, Offer]] = {}
    for node, of_node in held.items():
        for offer in of_node:
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
    """The text of the reply to a request's text; empty for an empty one."""
    if not request:
        return ""
    asked = as_names(adapter_of(SlotRequest).validate_json(request))
    return adapter_of(SlotReply).dump_json(as_text(_reply(keeper, asked))).decode()


def _replies(ask: Ask, requests: Mapping[str, SlotRequest]) -> dict[str, SlotReply]:
    replies = _ask_all(ask, requests)
    for reply in replies.values():
        if reply.why:
            raise _error(reply)
    return replies


def _ask_all(ask: Ask, requests: Mapping[str, SlotRequest]) -> dict[str, SlotReply]:
    texts = ask(
        {
            node: adapter_of(SlotRequest).dump_json(as_text(request)).decode()
            for node, request in requests.items()
        }
    )
    return {node: adapter_of(SlotReply).validate_json(text) for node, text in texts.items() if text}


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
