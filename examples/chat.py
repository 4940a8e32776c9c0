"""A conversation, whose later turns find the KV of earlier ones instead of computing it again.

python examples/chat.py
"""

from jaxllm import LLM, SamplingParams

SYSTEM = """This module reads text files and counts what is in them. Every function takes the path of a file,
opens it once, closes it again, and returns a plain dictionary or a number. Nothing is printed."""
QUESTIONS = ("Count the lines of a file.", "Count the words of a file.", "Find the longest line.")


def main() -> None:
    """Ask one question after another; say how much of each prompt was found."""
    params = SamplingParams(temperature=0, max_tokens=16)
    messages = [{"role": "system", "content": SYSTEM}]
    with LLM(max_model_len=256, max_num_seqs=4) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, params, use_tqdm=False)
            messages.append({"role": "assistant", "content": output.text})
            num_prompt = len(output.prompt_token_ids)
            print(f"{question} -> {output.text!r}")
            print(f"    prompt of {num_prompt} tokens, {output.num_cached_tokens} found in the prefix cache")


if __name__ == "__main__":
    main()
