"""`env.page=list`: what is shown of an accessibility tree, without a browser."""

from typing import Any

from birl.envs.browser.worker.listing import listed

ACTED = ("clickable", "button", "textbox", "checkbox")


def tree(*nodes: tuple[Any, ...]) -> dict[str, Any]:
    """Nodes as (role, name, number or None, children by place, properties)."""
    found = []
    for place, (role, name, number, children, *properties) in enumerate(nodes):
        node = {"nodeId": place, "role": {"value": role}, "name": {"value": name}, "childIds": list(children)}
        node |= {} if number is None else {"browsergym_id": number}
        node["properties"] = [{"name": n, "value": {"value": v}} for n, v in properties]
        found.append(node)
    return {"nodes": found}


def shown(*nodes: tuple[Any, ...], **clickable: bool) -> list[str]:
    extra = {number.removeprefix("n"): {"clickable": told} for number, told in clickable.items()}
    return listed(tree(*nodes), extra, ACTED, ("focusable",)).split("\n")


def test_numbers_stand_behind_texts() -> None:
    assert shown(
        ("RootWebArea", "A page", None, (1, 2, 3, 6)),
        ("StaticText", " Two \n words ", None, ()),
        ("button", "Submit", "7", (), ("focusable", True), ("focused", True)),
        ("generic", "", "8", (4, 5)),
        ("textbox", "", "9", (), ("required", False)),
        ("clickable", "here", "10", (), ("checked", "false")),
        ("image", "a cat", "11", ()),
    ) == ["Two words", "Submit [7] button focused", "[9] textbox", "here [10] checked='false'", "a cat"]


def test_what_is_said_already_is_not_said_again() -> None:
    assert shown(
        ("RootWebArea", "A page", None, (1, 3, 5)),
        ("button", "Yes please", "1", (2,)),
        ("StaticText", "please", None, ()),
        ("LabelText", "", "2", (4, 6)),
        ("checkbox", "cat", "3", ()),
        ("list", "things", "4", (7,)),
        ("StaticText", "cat", None, ()),
        ("StaticText", "dog", None, ()),
    ) == ["Yes please [1] button", "cat [3] checkbox", "dog"]


def test_what_reacts_has_its_number_whatever_it_is() -> None:
    nodes = (("RootWebArea", "", None, (1,)), ("cell", "x", "5", (2,)), ("StaticText", "x", None, ()))
    assert shown(*nodes) == ["x"]
    assert shown(*nodes, n5=True) == ["x [5] cell"]


def test_a_value_is_shown_and_a_broken_tree_is_no_loop() -> None:
    box: dict[str, Any] = tree(("textbox", "Name", "1", (0, 99)))
    box["nodes"][0]["value"] = {"value": "it's"}
    assert listed(box, {}, ACTED, ()) == 'Name [1] textbox value="it\'s"'
