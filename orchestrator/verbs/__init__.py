"""The verbs as a person types them: one file per group of actions; parse, call, print.

`orchestrator.cli` loads a file of this folder when one of its verbs is used, so that a verb costs
only what it needs. No verb decides anything that an action does not.
"""
