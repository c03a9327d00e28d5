"""Generators of random numbers of a pretended GPU: `torch.Generator("cuda")` and torch.cuda's.

Numbers are drawn on the CPU, so that they are not those that a GPU would give. A state is what a
GPU's is, a seed and an offset in 16 bytes, as kernels with a generator of their own read and
advance it; the state of the CPU's generator that belongs to it is remembered.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.patches import Replacements

_REMEMBERED = 4096  # states; one of the CPU's generator has 5 kB
_STATES: OrderedDict[tuple[int, int], Any] = OrderedDict()
_WORD = 1 << 64


def generators(torch: Any) -> Replacements:
    """What stands for torch's generators while a GPU is pretended."""
    kind = _make_kind(torch)
    default = kind("cuda", source=torch.default_generator)

    def get_rng_state(device: Any = "cuda") -> Any:
        return default.get_state()

    def set_rng_state(new_state: Any, device: Any = "cuda") -> None:
        default.set_state(new_state)

    def set_rng_state_all(new_states: Any) -> None:
        for state in new_states:
            default.set_state(state)

    yield torch, "Generator", kind
    answers = {
        "default_generators": (default,),
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [default.get_state()],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
        "initial_seed": default.initial_seed,
        **dict.fromkeys(("manual_seed", "manual_seed_all"), default.manual_seed),
        **dict.fromkeys(("seed", "seed_all"), default.seed),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, answer


def drawn_from(value: Any) -> Any:
    """The CPU's generator behind one of the pretended GPU's; anything else is itself."""
    return getattr(value, "_fa4_source", value)


class SeedAndOffset:
    """The methods of a generator that says it is the GPU's, over one of the CPU."""

    _fa4_source: Any
    _seed: int
    _offset: int

    @property
    def device(self) -> Any:
        """Where it says that it is."""
        import torch

        return torch.device("cuda", 0)

    def manual_seed(self, seed: int) -> Any:
        """Begins anew."""
        self._fa4_source.manual_seed(seed)
        self._seed, self._offset = int(seed) % _WORD, 0
        _remember((self._seed, 0), self._fa4_source.get_state())
        return self

    def seed(self) -> int:
        """Begins anew with a seed that nobody knows; the seed."""
        self.manual_seed(self._fa4_source.seed())
        return self._seed

    def initial_seed(self) -> int:
        """The seed."""
        return self._seed

    def get_offset(self) -> int:
        """How far it has come: 4 more for all that was drawn since it was asked."""
        import torch

        now = self._fa4_source.get_state()
        while not torch.equal(_STATES.get((self._seed, self._offset), now), now):
            self._offset += 4
        _remember((self._seed, self._offset), now)
        return self._offset

    def set_offset(self, offset: int) -> None:
        """Goes to a place behind the same seed."""
        self._go_to(self._seed, offset)

    def get_state(self) -> Any:
        """Seed and offset, uint8 (16,)."""
        import torch

        words = struct.pack("<QQ", self._seed, self.get_offset())
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def set_state(self, new_state: Any) -> Any:
        """Goes to such a state. Raises RuntimeError for another type or length."""
        import torch

        if new_state.dtype != torch.uint8 or new_state.numel() != 16:
            raise RuntimeError(
                "the state of a GPU's generator is 16 bytes (uint8); got "
                f"{new_state.numel()} of {new_state.dtype}"
            )
        self._go_to(*struct.unpack("<QQ", bytes(new_state.tolist())))
        return self

    def clone_state(self) -> Any:
        """Another generator that goes on from here."""
        other = type(self)("cuda")  # type: ignore[call-arg]
        other._seed, other._offset = self._seed, self.get_offset()
        other._fa4_source.set_state(self._fa4_source.get_state())
        return other

    def _go_to(self, seed: int, offset: int) -> None:
        self._seed, self._offset = seed, offset
        known = _STATES.get((seed, offset))
        if known is None:
            self._fa4_source.manual_seed((seed + offset * 0x9E3779B97F4A7C15) % _WORD)
            _remember((seed, offset), self._fa4_source.get_state())
        else:
            self._fa4_source.set_state(known)


def _make_kind(torch: Any) -> Any:
    """The class that stands for torch.Generator: on the CPU it makes torch's own."""
    own = torch.Generator

    class GeneratorKind(type(own)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, own)

    class PretendedGenerator(SeedAndOffset, own, metaclass=GeneratorKind):  # type: ignore[valid-type, misc]
        """A generator that says it is the GPU's."""

        def __new__(cls, device: Any = "cpu", source: Any = None) -> Any:
            where = torch.device(device)
            if where.type != "cuda":
                return own(device)
            if where.index:
                raise LaunchError(f"device {where}: the pretended GPU is cuda:0")
            made = super().__new__(cls, "cpu")
            made._fa4_source = source or own("cpu")
            made._seed, made._offset = made._fa4_source.initial_seed(), 0
            _remember((made._seed, 0), own("cpu").manual_seed(made._seed).get_state())
            return made

        def __init__(self, *_: Any, **__: Any) -> None:
            """Made above."""

    return PretendedGenerator


def _remember(where: tuple[int, int], state: Any) -> None:
    _STATES[where] = state
    _STATES.move_to_end(where)
    while len(_STATES) > _REMEMBERED:
        _STATES.popitem(last=False)
