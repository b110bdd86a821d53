"""Chrome traces as files, and the labels that they carry."""
