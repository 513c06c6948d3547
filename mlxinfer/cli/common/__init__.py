"""Options, output and waiting that several commands share."""
