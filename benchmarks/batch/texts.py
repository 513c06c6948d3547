"""The prompts."""

from __future__ import annotations

from typing import Any

from ..kv.text import text

Messages = list[dict[str, str]]
_LETTERS_A_TOKEN = 8

STORY = "Once upon a time there was a lighthouse keeper who had never seen the sea. One morning"
STORIES = (
    STORY,
    "Write a long story about a clockmaker and her apprentice.\n\nThe snow had begun to fall when",
    "The letter arrived on a Tuesday, forty years too late. Inside,",
    "Nobody in the village remembered who had built the bridge, but",
)

QUESTIONS = (
    "What does an assignment statement do?",
    "Give me an example of that.",
    "And what happens with two targets?",
    "Can a class have methods?",
    "How do I create an instance of one?",
    "What does an import statement do?",
    "Can I give it another name?",
    "What is a tuple, in one sentence?",
    "Is a list the same thing?",
    "Thank you. Which of these is the most important?",
)

CODE = '''def describe_order(order, prices, customer):
    """Return the text of a receipt."""
    lines = []
    total = 0.0
    lines.append("Receipt")
    lines.append("=======")
    lines.append("Customer: " + customer.name)
    lines.append("Address: " + customer.address)
    lines.append("City: " + customer.city)
    lines.append("")
    for item in order.items:
        price = prices.get(item.name)
        if price is None:
            lines.append("unknown item: " + item.name)
            continue
        cost = price * item.count
        total = total + cost
        lines.append(f"{item.count} x {item.name}: {cost:.2f}")
    if order.discount:
        saved = total * order.discount
        total = total - saved
        lines.append(f"Discount: {saved:.2f}")
    if order.express:
        total = total + 12.5
        lines.append("Express delivery: 12.50")
    tax = total * 0.19
    lines.append(f"Tax: {tax:.2f}")
    lines.append(f"Total: {total + tax:.2f}")
    if customer.points > 100:
        lines.append("Thank you for being a regular customer!")
    elif customer.points > 10:
        lines.append("Thank you for coming back!")
    else:
        lines.append("Welcome to our shop!")
    if order.note:
        lines.append("")
        lines.append("Note: " + order.note)
    lines.append("")
    lines.append("Printed on " + order.date)
    return "\\n".join(lines)
'''
_RENAMED = (("total", "amount"), ("describe_order", "print_receipt"), ("customer", "client"), ("lines", "rows"))


def passage(tokenizer: Any, tokens: int, number: int) -> str:
    """Technical prose of about this many tokens; passages with different numbers have no common prefix."""
    start = f"{number}. edition.\n\n" + text()[: tokens * _LETTERS_A_TOKEN]
    cut: str = tokenizer.decode(tokenizer.encode(start)[:tokens])
    return cut


def edits() -> list[Messages]:
    """Tasks whose answers mostly repeat the question."""
    ask = "Rename `{}` to `{}` in this code, and give all of the code again."
    return [[{"role": "user", "content": f"{ask.format(*names)}\n\n```python\n{CODE}```"}] for names in _RENAMED]
