"""A page as short lines, one for each text and each interactive element: its text, its number, its kind.

    Click on the "submit" button.
    submit [19] button
    [15] textbox value='abc'

A model names an element by a text, and small models best copy what follows a text: so the number comes directly after
it. Depth, and elements that are neither interactive nor have a text, are left out.
"""

from collections.abc import Collection, Iterator
from typing import Any

Node = dict[str, Any]
SILENT = ("clickable", "generic", "LabelText")  # kinds that do not indicate a use
ABOVE_TREE = ("RootWebArea", "WebArea")


def listed(tree: Any, extra: Any, acted: Collection[str], ignored: Collection[str]) -> str:
    """`tree`, `extra`: as BrowserGym extracts them. `acted`: roles of interactive elements. `ignored`: properties that
    are not shown."""
    nodes = {node["nodeId"]: node for node in tree["nodes"]}
    lines: list[str] = []
    previous = ""  # the text of the last line: labels often occur twice
    for node, above in _walk(tree["nodes"][0], nodes, acted):
        text = " ".join(_value(node, "name").split())
        number = node.get("browsergym_id")
        kind = node["role"]["value"]
        acts = number is not None and (kind in acted or bool(extra.get(number, {}).get("clickable")))
        if acts and (text or _alone(node, nodes)):
            about = [] if kind in SILENT else [kind]
            lines.append(" ".join([*([text] if text else []), f"[{number}]", *about, *_properties(node, ignored)]))
        elif text and text != previous and text not in above and _speaks(node, nodes):
            lines.append(text)
        else:
            continue
        previous = text
    return "\n".join(lines)


def _walk(node: Node, nodes: dict[Any, Node], acted: Collection[str], above: str = "") -> Iterator[tuple[Node, str]]:
    """Yield every node in the order of the page, with the text of its enclosing interactive element."""
    yield node, above
    if node["role"]["value"] in acted:
        above = f"{above} {' '.join(_value(node, 'name').split())} {_value(node, 'value')}"
    for child in node.get("childIds", ()):
        if child in nodes and child != node["nodeId"]:
            yield from _walk(nodes[child], nodes, acted, above)


def _alone(node: Node, nodes: dict[Any, Node]) -> bool:
    """Whether a node without a text is shown: if its kind indicates its use, or if nothing in it does."""
    return node["role"]["value"] not in SILENT or not any(child in nodes for child in node.get("childIds", ()))


def _speaks(node: Node, nodes: dict[Any, Node]) -> bool:
    """Whether a node has a text, or a name (such as a picture's) that no text in it repeats."""
    if node["role"]["value"] in ABOVE_TREE:
        return False
    return node["role"]["value"] == "StaticText" or not any(child in nodes for child in node.get("childIds", ()))


def _properties(node: Node, ignored: Collection[str]) -> Iterator[str]:
    if _value(node, "value"):
        yield f"value={_value(node, 'value')!r}"
    for result in node.get("properties", ()):
        name, value = result["name"], result.get("value", {}).get("value")
        if name in ignored or value is None:
            continue
        if name in ("required", "focused", "atomic"):
            yield from [name] if value else []
        else:
            yield f"{name}={value!r}"


def _value(node: Node, name: str) -> str:
    return str(node.get(name, {}).get("value", "") or "")
