"""The built-in prompts of `demo` and `check`: everyday work, some of which copies from the prompt and some does not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A prompt with a name short enough for a table."""

    name: str
    prompt: str

    @property
    def chat(self) -> list[dict[str, str]]:
        """As a user's message."""
        return [{"role": "user", "content": self.prompt}]


_EDIT_CODE = '''Rename the function `total` to `order_total` and the parameter `xs` to `items`. Change nothing else \
and show the whole program.

```python
def total(xs, tax_rate):
    """Sum the prices and add tax."""
    subtotal = 0
    for price, quantity in xs:
        subtotal += price * quantity
    tax = subtotal * tax_rate
    return round(subtotal + tax, 2)

print(total([(2.50, 4), (1.20, 10)], 0.2))
```'''

_REWRITE_LIST = """Write this shopping list again, one item per line with a dash in front of it:

500 g of wholemeal flour, 2 ripe bananas, 250 ml of oat milk, a jar of peanut butter, 6 free-range eggs, \
a bag of frozen blueberries, 100 g of dark chocolate, a bottle of olive oil"""

_EXTRACT = """Copy every sentence of this report that mentions money, word for word.

The library opened its new reading room in March. The building work cost 340,000 pounds, a tenth more than planned. \
Visitors rose to 1,200 a week. The council pays 95,000 pounds a year towards staff. Most readers come on Saturdays. \
A café would bring in about 18,000 pounds a year. The garden will be planted next spring."""

_CHAT = "What makes a good neighbour? Answer in a few sentences, as you would to a friend."

_SUM = "A train leaves at 9:40, stops twice for 5 minutes and arrives at 12:15. How long was it moving? Explain why."

_STORY = "Write the opening of a story about a lighthouse keeper who finds a letter in a bottle."

_TRANSLATE = "Translate into French: The weather is fine today, so we are going to walk along the river until evening."

_JSON = """Turn this into JSON with the keys name, born and towns: Ada Brook, born in 1954, lived in Leeds, York and \
Hull; Ben Marsh, born in 1961, lived in Bath and Wells."""

DEMO: tuple[Example, ...] = (
    Example("edit code", _EDIT_CODE),
    Example("rewrite a list", _REWRITE_LIST),
    Example("extract sentences", _EXTRACT),
    Example("open question", _CHAT),
)
"""Three whose answers copy from the prompt, and one whose answer does not."""

EXAMPLES: tuple[Example, ...] = (
    *DEMO,
    Example("arithmetic", _SUM),
    Example("story", _STORY),
    Example("translate", _TRANSLATE),
    Example("to JSON", _JSON),
)
