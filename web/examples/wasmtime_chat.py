"""Answers a message with the plain module that renders chat templates, in wasmtime:
python3 wasmtime_chat.py plain-simd128-chat.wasm MODEL "Who are you?"
"""

import json
import sys
from pathlib import Path

from wasmtime_story import PIECE, Starling


def chat(module_path, model_path, message, max_tokens=64, **sampling):
    starling = Starling(module_path)
    model = Path(model_path).read_bytes()
    loader = starling.raw("starling_loader", len(model), 0)
    for at in range(0, len(model), PIECE):
        starling.call("starling_feed", loader, starling.buffer(model[at : at + PIECE]))
    session = starling.call("starling_open", loader, starling.buffer('{"n_ctx": 512}'))
    request = {
        "chat": {"messages": [{"role": "user", "content": message}]},
        "max_tokens": max_tokens,
        "sampling": sampling,
    }
    starling.call("starling_submit", session, starling.buffer(json.dumps(request)))
    text = ""
    while True:
        for event in starling.call("starling_step", session)["events"]:
            text += event.get("text", "")
            if event["type"] == "done":
                return {"text": text, "reason": event["reason"]}


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__.strip())
    print(json.dumps(chat(*sys.argv[1:], temperature=0)))
