"""Two replicas of the server on Ray Serve: a request that names a text goes to the replica that has read it.

pip install '.[serve]' 'ray[serve]>=2.60'
python examples/serve_ray.py [PORT]
"""

import sys

import ray
from openai import OpenAI
from ray import serve
from ray.serve.config import RequestRouterConfig

FACTS = {"north": {"Naislet": 364735, "Breamuth": 906112}, "south": {"Quorrin": 558240, "Stithel": 771309}}
FILLER = "The baker counted the boats in the harbour and went home before it rained. " * 8
TEXTS = {name: "".join(f"{FILLER}The code of {key} is {code}. " for key, code in FACTS[name].items()) for name in FACTS}


def application():
    """The application of one replica, in a separate process. `server_of` has the options of `kvevict serve`."""
    from kvevict.serve.app import application
    from kvevict.serve.start import server_of

    return application(server_of(budget=256))


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    hashing = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # of the header x-session-id
    router = RequestRouterConfig(request_router_class=hashing, request_router_kwargs={"num_fallback_replicas": 0})
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    serve.run(serve.deployment(serve.ingress(application)(), num_replicas=2, request_router_config=router).bind())
    for name, text in TEXTS.items():
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", default_headers={"x-session-id": name})
        client.post("/kvevict/texts", body={"name": name, "text": text}, cast_to=object)
        for key in FACTS[name]:
            prompt, opens = f"Question: What is the code of {key}?\nAnswer:", {"kvevict": {"text": name}}
            said = client.completions.create(model="small_llama", prompt=prompt, max_tokens=12, extra_body=opens)
            print(f"{name}: {said.choices[0].text!r}, {said.usage.prompt_tokens_details.cached_tokens} tokens cached")
