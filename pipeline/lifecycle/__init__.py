"""The rules of a stream of events: the lifecycles of items, the state of a stream, and the checker of its rules.

To add a kind of item that this server runs, as `CodeInterpreterCall` is one, change these seven files:

1. ``pipeline/protocol/items.py``: its struct, with its id prefix and its tool, in the unions that it belongs to
2. ``pipeline/protocol/events.py``: the events that it has between added and done, if the API has any
3. ``pipeline/frames.py``: the frame that opens it, and the data of its `CallFinished`
4. ``pipeline/lifecycle/item_lifecycles.py``: its row; the writer and the state of a stream follow it
5. ``pipeline/lifecycle/rules.py``: its row for the checker
6. ``stages/models/output_items.py``: the builder of the item from its frames
7. ``pipeline/protocol/params/items.py``: its form in a request, which becomes the item

An item whose call the client runs needs no `CallFinished`: of step 3 only its opening frame is left.  The frame that
opens an item of a built-in tool is also in the `HostedKind` of the tool, by which the parsers find it.

``stages/models/call_results.py`` can rebuild the result of its call from the item, for a server that has lost the text
that the model read; without that it calls the result forgotten.

The type checker and ``tests/flow/test_item_kind.py`` find what is forgotten; that test adds a kind from the outside.
The tool itself is another matter: ``pipeline/protocol/tools.py`` and a host in ``extensions/tools``.
"""
