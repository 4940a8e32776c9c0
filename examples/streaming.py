"""Text as it comes: `LLM.stream`, ending it early, and a loop of your own around the engine.

python examples/streaming.py
"""

from jaxllm import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24)


def main() -> None:
    """Three ways to see tokens before a request has ended."""
    with LLM(max_model_len=256, max_num_seqs=4) as llm:
        print_as_it_comes(llm)
        end_early(llm)
        own_loop(llm)


def print_as_it_comes(llm: LLM) -> None:
    """Every output holds all of the text so far."""
    shown = 0
    for output in llm.stream("def read_lines(path):\n", PARAMS):
        print(output.text[shown:], end="", flush=True)
        shown = len(output.text)
    print(f"\n[{output.finish_reason}]")


def end_early(llm: LLM) -> None:
    """Closing the stream ends what is left of its requests, here after the first line."""
    stream = llm.stream("import os\n", PARAMS)
    for output in stream:
        if "\n" in output.text:
            stream.close()
            break
    print(f"{output.text!r} [stopped after {len(output.token_ids)} tokens]")


def own_loop(llm: LLM) -> None:
    """Add requests between steps, from one thread. A step may report nothing: it runs ahead of the host."""
    engine = llm.engine
    engine.add_request("first", "class Stack:", PARAMS, stream=True)
    num_steps = 0
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                print(f"{output.request_id} ended in step {num_steps} with {len(output.token_ids)} tokens")
        num_steps += 1
        if num_steps == 2:
            engine.add_request("second", "def pop(self):", PARAMS)


if __name__ == "__main__":
    main()
