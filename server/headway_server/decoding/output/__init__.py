"""What a sequence's tokens become: text. `interfaces.OutputAssembler` is the place for others."""
