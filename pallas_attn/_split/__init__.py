"""How work is cut, dealt to programs and merged."""
