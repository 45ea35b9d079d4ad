"""Calls beyond one machine: workers that take calls from NATS JetStream, and clients that submit them.

docs/fleet.md has the subjects, streams and messages, and who may do what. All that speaks NATS runs on
asyncio, because nats-py does; plugins are run on trio. runner/fleet/crossing.py is between the two.
"""
