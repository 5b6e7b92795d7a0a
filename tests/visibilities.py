"""What a layer's queries may see, and its definition one pair of positions at a time."""

from hypothesis import strategies as st

from mtcli.core.mesh.visibility import Visibility

LIMITS = st.none() | st.integers(0, 9)
BANDS = st.builds(Visibility, LIMITS, LIMITS)


class Chunks(Visibility):
    """What no layer of mtcli sees: of its own four positions, counted from 0, those up to itself.
    No distance says it."""

    hides_early = True

    def first_key(self, query):
        return query - query % 4


VISIBILITIES = BANDS | st.just(Chunks())


def sees(visibility, query, key):
    if isinstance(visibility, Chunks):
        return key <= query and key // 4 == query // 4
    before, after = visibility.left, visibility.right
    return (before is None or query - key <= before) and (after is None or key - query <= after)
