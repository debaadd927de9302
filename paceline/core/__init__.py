"""The basic types, which every other package imports. This package imports none of them."""
