"""Answers that fit a schema, one of a few texts, or an expression. Run: python examples/structured.py [MODEL]"""

import json
import sys

from mlxinfer import LLM, Choice, Regex, SamplingParams, Schema

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
properties = {"capital": {"type": "string", "maxLength": 40}, "continent": {"enum": ["Africa", "America", "Asia", "Europe"]}}
city = Schema({"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False})


def ask(question: str, structure: Schema | Choice | Regex) -> str:
    return llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, structure=structure)).text


answer = json.loads(ask("What is the capital of France, and on which continent is it? Answer as JSON.", city))
print(f"the capital is {answer['capital']}, in {answer['continent']}")
print(ask("Is the sky blue?", Choice(["yes", "no"])))
print(ask("When did the Second World War end?", Regex("[0-9]{4}")))
