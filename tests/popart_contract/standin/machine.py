"""The make-believe host: which SDK it has, which IPUs, and what the session did there."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Machine:
    """What `install` sets up for a test.

    Attributes:
      sdk: "3.4.0" or "3.2.0"; the second lacks some operators and reads some nodes differently.
      num_ipus: IPUs on the host, given out in sets of a power of two.
      proto_limit: bytes that protobuf can parse; a test lowers it.
      attached: IPUs that devices hold.
      loop_steps: (place of a Loop, steps that it made) in the order in which loops ended.
      sessions: every InferenceSession made, for tests that look inside.
    """

    sdk: str = "3.4.0"
    num_ipus: int = 16
    proto_limit: int = 2**31 - 1
    attached: int = 0
    loop_steps: list = dataclasses.field(default_factory=list)
    sessions: list = dataclasses.field(default_factory=list)

    @property
    def is_3_2(self):
        return self.sdk.startswith("3.2")

    def reset(self, **settings):
        """Start anew."""
        self.__init__(**settings)


MACHINE = Machine()
