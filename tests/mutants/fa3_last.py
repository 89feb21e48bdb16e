"""Planted bugs where several blocks share each of the last kv tiles."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import PARTED_GRADIENTS

__all__ = ["BUGS", "HOST"]

_TYPES = "cuda_src/fa3/backward_types.cuh"
_CUTS = "cuda_src/fa3/backward_parts.cuh"
_ROWS = "cuda_src/fa3/backward_rows.cuh"
_SUM = "cuda_src/fa3/sum_parts.cu"
_KEY_PARTS = "cuflash/planning/key_parts.py"
_CHOICE = "cuflash/planning/parts_choice.py"
_ORDER = "cuflash/planning/row_order.py"

_LAST = "test_key_parts.py::test_cut_last_tiles_against_float64"
_PLANS = "tests/unit/test_plan_last_tiles.py"
_ORDERS = "tests/unit/test_row_order.py"
_CHOICES = "tests/unit/test_plan_parts_choice.py::test_parts_where_blocks_are_few"


def _bug(name: str, find: str, replace: str, file: str = _CUTS) -> Bug:
    return Bug(name, file, find, replace, PARTED_GRADIENTS, emulated=_LAST)


BUGS = (
    _bug(
        "every part of a last tile has a tile of its own",
        "tile = cut ? whole + (place - whole) / parts : place;",
        "tile = place;",
    ),
    _bug(
        "the parts of a last tile are all the first",
        "part = cut ? (place - whole) % parts : 0;",
        "part = 0;",
    ),
    _bug(
        "whole tiles have the steps of a part",
        "parts = cut ? static_cast<unsigned>(params.parts) : 1;",
        "parts = static_cast<unsigned>(params.parts);",
    ),
    _bug(
        "parts of last tiles begin at the first step",
        "cut_begin = static_cast<int>(each * part + earlier);",
        "cut_begin = 0;",
    ),
    _bug(
        "heads are divided by the parts of last tiles",
        "if constexpr (Config::parted && !Config::cut_last) {",
        "if constexpr (Config::parted) {",
        _TYPES,
    ),
    _bug(
        "the query heads of a group are multiplied by the parts of last tiles",
        "if constexpr (Config::cut && !Config::cut_last) {",
        "if constexpr (Config::cut) {",
    ),
    _bug(
        "all parts of last tiles lie in one place",
        "return c.cut_place * c.params.padded_keys;",
        "return 0;",
        _TYPES,
    ),
    _bug(
        "a head of last tiles waits for a block for each tile and part",
        "return tiles + cut * (static_cast<int>(params.parts) - 1);",
        "return tiles + cut * static_cast<int>(params.parts);",
        _ROWS,
    ),
    _bug(
        "every head waits for parts of last tiles",
        "max(0ll, min(end - params.whole_tiles, 0ll + tiles))",
        "tiles",
        _ROWS,
    ),
    _bug(
        "there are as many blocks as tiles",
        "return whole + (tiles - whole) * static_cast<unsigned>(params.parts);",
        "return tiles;",
    ),
    _bug(
        "blocks of rows take places for tiles",
        "first = PlacedTile<Config>(params, first).tile;",
        "",
        _ROWS,
    ),
    _bug(
        "the sum takes the first tiles for the last",
        "const long long tile = params.whole_tiles + cut;",
        "const long long tile = cut;",
        _SUM,
    ),
    _bug(
        "the sum of a last tile has the rows of the first tile of its head",
        "at.row = static_cast<int>(tile % tiles) * block_kv + row;",
        "at.row = row;",
        _SUM,
    ),
    _bug(
        "the sum takes the parts of one last tile for those of another",
        "at.row_of_parts = cut * params.parts * block_kv + row;",
        "at.row_of_parts = cut * block_kv + row;",
        _SUM,
    ),
)

HOST = (
    Bug(
        "the main kernel is not told which tiles are whole",
        _KEY_PARTS,
        'return (*both, ("whole_tiles", self.whole_tiles)) if self.shared.last else both',
        "return both",
        _PLANS,
    ),
    Bug(
        "the main kernel is not told that only the last tiles are cut",
        _KEY_PARTS,
        '"cut_last": int(shared.last > 0),',
        '"cut_last": 0,',
        _PLANS,
    ),
    Bug(
        "one tile too many is whole",
        _KEY_PARTS,
        "return self.tiles - self.shared.last",
        "return self.tiles - self.shared.last + 1",
        _PLANS,
    ),
    Bug(
        "the workspace has a part of each last tile",
        _KEY_PARTS,
        "rows = cut * self.parts * self.padded_keys",
        "rows = cut * self.padded_keys",
        _PLANS,
    ),
    Bug(
        "the sum has a warp for every place of every tile",
        _KEY_PARTS,
        "strips = self.shared.last * self.padded_keys // SUM_ROWS",
        "pass",
        _PLANS,
    ),
    Bug(
        "no block converts where the last tiles are cut",
        "cuflash/planning/fa3.py",
        "if shared.cut and not shared.last:  # no block has all rows of a head",
        "if shared.cut:",
        _PLANS,
    ),
    Bug(
        "no block clears where the last tiles are cut",
        "cuflash/planning/fa3.py",
        "clears = not (tile.stays or (shared.cut and not shared.last))",
        "clears = not (tile.stays or shared.cut)",
        "tests/unit/test_row_order.py::test_a_launch_has_the_numbers_of_its_order",
    ),
    Bug(
        "heads come in groups where the last tiles are cut",
        "cuflash/planning/backward_head_group.py",
        "if shared.last:\n        return 1",
        "if False:\n        return 1",
        _PLANS,
    ),
    Bug(
        "tiles of unequal work are cut last",
        _CHOICE,
        'return problem.mask == "full" and _may_cut(problem)',
        "return _may_cut(problem)",
        "tests/unit/test_plan_parts_choice.py",
    ),
    Bug(
        "last tiles are cut after many rounds",
        _CHOICE,
        "0 < rounds < _MANY_EVEN_ROUNDS",
        "0 < rounds",
        _CHOICES,
    ),
    Bug(
        "cutting last tiles is worth it at 128 queries a step as at 64",
        _CHOICE,
        "if best.last and tile.block_q == fa3.ROWS else",
        "if best.last else",
        _CHOICES,
    ),
    Bug(
        "whole tiles take no time where the last ones are cut",
        _CHOICE,
        "steps += ceil_div(whole, at_once) * (longest + _STEPS_OF_BLOCK)",
        "steps += 0",
        "tests/unit/test_plan_key_parts_time.py",
    ),
    Bug(
        "rounds end with the tiles and not with their parts",
        _ORDER,
        "return self.heads * self.tiles + shared.last * (shared.number - 1)",
        "return self.heads * self.tiles",
        _ORDERS,
    ),
    Bug(
        "a tile is at the place of its first part",
        _ORDER,
        "return place - beyond + beyond // (self.shared.number if self.shared.last else 1)",
        "return place",
        _ORDERS,
    ),
)
