"""Two replicas of the server on Ray Serve that share a folder: a text that one has read is answered by either.

pip install '.[serve]' 'ray[serve]>=2.60'
python examples/serve_ray.py [PORT [FOLDER]]

On more machines FOLDER is on a file system that all of them have.
"""

import sys
import tempfile

import ray
from openai import OpenAI
from ray import serve

FACTS = {"north": {"Naislet": 364735, "Breamuth": 906112}, "south": {"Quorrin": 558240, "Stithel": 771309}}
FILLER = "The baker counted the boats in the harbour and went home before it rained. " * 8
TEXTS = {name: "".join(f"{FILLER}The code of {key} is {code}. " for key, code in FACTS[name].items()) for name in FACTS}


def replica(folder):
    """Makes the application of one replica, in a separate process. `server_of` has the options of `kvevict serve`."""

    def application():
        from kvevict.serve.app import application
        from kvevict.serve.start import server_of

        return application(server_of(budget=256, store=folder))

    return application


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    folder = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    serve.run(serve.deployment(serve.ingress(replica(folder))(), num_replicas=2).bind())
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    for stored, text in TEXTS.items():
        client.post("/kvevict/texts", body={"name": stored, "text": text}, cast_to=object)
    for name, key in [(name, key) for name, facts in FACTS.items() for key in facts] * 2:
        prompt, opens = f"Question: What is the code of {key}?\nAnswer:", {"kvevict": {"text": name}}
        said = client.completions.create(model="small_llama", prompt=prompt, max_tokens=12, extra_body=opens)
        print(f"{name}: {said.choices[0].text!r}, {said.usage.prompt_tokens_details.cached_tokens} tokens cached")
