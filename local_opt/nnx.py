"""Objects of flax.nnx, which a step updates in place, as arguments of mapped functions.

Flax is optional: if a program has not imported it, no argument can hold its objects.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

WORDS = ("worker", "replicated")  # the words that an object may have


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
    """Stands where an object was, and has no leaves."""

    index: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Graph:
    """Objects without their arrays; every reference occurs once."""

    definition: Any  # nnx.GraphDef
    structure: Any  # the structure of the nnx.State
    names: tuple[str, ...]  # the names of its arrays
    words: tuple[str, ...]  # the words of its arrays
    of_objects: tuple[str, ...]  # the words of the objects


class Objects(NamedTuple):
    """The objects of a tree: what `nnx.split` makes of them."""

    graph: Graph
    arrays: dict[str, Any]  # by name


class Taken(NamedTuple):
    """A tree with places for its objects."""

    tree: PyTree
    objects: Objects | None  # None if there are none
    given: tuple  # the objects themselves
    words: list[str]  # the words of the leaves of `tree`, then of the objects' arrays


def take(tree: PyTree, words: Sequence[str] | None = None) -> Taken:
    """Takes the objects out of a tree, whose leaves have these words."""
    nnx: Any = sys.modules.get("flax.nnx")
    words = ["worker"] * len(jax.tree.leaves(tree)) if words is None else list(words)
    if nnx is None or not any(map(_is_object, _nodes(tree))):
        return Taken(tree, None, (), words)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
    given, names, of_objects, of_others, places = [], [], [], [], []
    for path, x in leaves:
        chunk = [words.pop(0) for _ in jax.tree.leaves(x)]
        if not _is_object(x):
            of_others += chunk
            places.append(x)
            continue
        name = jax.tree_util.keystr(path).removeprefix(".")
        if not {*chunk} <= {*WORDS} or len({*chunk}) > 1:
            raise ValueError(
                f"{name} is a {type(x).__name__} of flax.nnx with the words "
                f"{sorted({*chunk})}: give the whole object one word, 'worker' or 'replicated'."
            )
        places.append(Place(len(given)))
        given.append(x)
        names.append(name)
        of_objects.append(chunk[0] if chunk else "replicated")
    _check_shared(nnx, given, names, of_objects)
    definition, state = nnx.split(tuple(given))
    arrays, word_of = {}, {}
    for (first, *path), x in jax.tree_util.tree_leaves_with_path(state):
        index = int(jax.tree_util.keystr((first,), simple=True))
        inside = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
        name = f"{names[index]}.{inside}".removesuffix(".value").removesuffix(".")
        arrays[name], word_of[name] = x, of_objects[index]
    graph = Graph(
        definition,
        jax.tree.structure(state),
        tuple(arrays),
        tuple(word_of.values()),
        tuple(of_objects),
    )
    words = [*of_others, *jax.tree.leaves(word_of)]  # in the order of a dict's leaves
    return Taken(structure.unflatten(places), Objects(graph, arrays), tuple(given), words)


def merge(objects: Objects | None) -> tuple:
    """New objects, which share what the taken ones shared."""
    return () if objects is None else sys.modules["flax.nnx"].merge(*_state_of(objects))


def put(tree: PyTree, objects: tuple) -> PyTree:
    """The tree, with these objects in their places."""
    is_place = lambda x: isinstance(x, Place)  # noqa: E731
    back = lambda x: objects[x.index] if is_place(x) else x  # noqa: E731
    return jax.tree.map(back, tree, is_leaf=is_place) if objects else tree


def changes(before: Objects, objects: tuple) -> tuple[dict[str, Any], dict[str, str]]:
    """The objects' arrays after a step, and their words; replicated arrays only if they changed."""
    definition, state = sys.modules["flax.nnx"].split(objects)
    if (definition, jax.tree.structure(state)) != (before.graph.definition, before.graph.structure):
        raise ValueError(
            "the function adds, removes or replaces parts of an object of flax.nnx, or sets a "
            "value that is not an array, like model.train(): do that before map_workers."
        )
    word_of = dict(zip(before.graph.names, before.graph.words, strict=True))
    arrays = dict(zip(before.graph.names, jax.tree.leaves(state), strict=True))
    arrays = {
        name: x
        for name, x in arrays.items()
        if word_of[name] != "replicated" or x is not before.arrays[name]
    }
    return arrays, {name: word_of[name] for name in arrays}


def update(taken: Taken, arrays: dict[str, Any]) -> None:
    """Writes arrays into the objects that were taken."""
    if taken.objects is not None:
        whole = taken.objects._replace(arrays=taken.objects.arrays | arrays)
        sys.modules["flax.nnx"].update(taken.given, _state_of(whole)[1])


def places_of(tree: PyTree, words: Sequence[str], graph: Graph, objects: tuple) -> PyTree:
    """A result in which places stand for the objects that keep their word."""
    words = list(words)

    def place(x):
        chunk = {words.pop(0) for _ in jax.tree.leaves(x)}
        for i, given in enumerate(objects):
            if x is given and chunk <= {graph.of_objects[i]}:
                return Place(i)
        return x

    return jax.tree.map(place, tree, is_leaf=_is_node)


def share_as(like: PyTree, tree: PyTree) -> PyTree:
    """A tree of the same structure, whose objects share the variables that those of `like` share.

    Without this a shared variable would become several copies.
    """
    before, (places, after, *_) = take(like).objects, take(tree)
    if before is None or after is None or len(before.arrays) == len(after.arrays):
        return tree
    arrays = {name: after.arrays[name] for name in before.arrays}
    return put(places, merge(before._replace(arrays=arrays)))


def _state_of(objects):
    arrays = [objects.arrays[name] for name in objects.graph.names]
    return objects.graph.definition, objects.graph.structure.unflatten(arrays)


def _is_object(x):
    nnx: Any = sys.modules.get("flax.nnx")
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_node(x):
    """Whether this is an object, or a state, whose variables are not updated in place."""
    return _is_object(x) or isinstance(x, sys.modules["flax.nnx"].State)


def _nodes(tree):
    return jax.tree.leaves(tree, is_leaf=_is_node)


def _check_shared(nnx, given, names, words) -> None:
    """Raises ValueError if one variable would have two words."""
    seen = {}
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    for x, name, word in zip(given, names, words, strict=True):
        for variable in filter(is_variable, jax.tree.leaves(x, is_leaf=is_variable)):
            first, other = seen.setdefault(id(variable), (name, word))
            if other != word:
                raise ValueError(
                    f"{first} is {other!r} in in_specs and {name}, which shares a "
                    f"{type(variable).__name__} with it, {word!r}: give both one word."
                )
