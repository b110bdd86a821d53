"""Prompts that a round sent to a language model, with its answers."""

from shardlab.core.document import Document


class Exchange(Document):
    """One prompt, after the system message of its conversation, and the answer."""

    user: str
    """message of the user"""
    ids: list[str]
    """candidates in the order of the list; the schema of the answer allows these and abstain"""
    answer: str
    """as received, except that a key in it is cut out"""


class Conversation(Document):
    """All prompts of a round in the order in which they were sent, probes first."""

    judge: str
    endpoint: str | None = None
    """base URL; None: the model ran on this machine"""
    model: str | None = None
    """name at the endpoint, or path; None: no model was asked"""
    dialect: str | None = None
    """how the endpoint was given the schema: json_schema, json_object, or text: not at all"""
    system: str = ""
    """system message of every prompt"""
    exchanges: list[Exchange] = []
