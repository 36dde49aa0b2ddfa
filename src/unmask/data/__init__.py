"""corpus -> tokens -> blocks -> masked batch."""
