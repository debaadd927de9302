"""The moving pictures of the documentation, each made by running what it shows: `make pictures`."""
