"""From costs to a placement that can say why."""
