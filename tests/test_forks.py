"""What another thread must not hold while the process forks."""

import threading

from tvmgemm.forks import once


def test_nothing_is_locked_while_a_value_is_computed():
    """Each thread waits for the other while it computes: under a lock neither would come."""
    both = threading.Barrier(2, timeout=60)

    class Half:
        @once
        def value(self):
            """A value."""
            both.wait()
            return threading.get_ident()

    half, found = Half(), []
    other = threading.Thread(target=lambda: found.append(half.value))
    other.start()
    found.append(half.value)
    other.join()
    assert len(set(found)) == 2 and half.value == half.value in found
    assert Half.value.__doc__ == "A value."
