"""Output assemblers of a sequence's tokens; the interface is `interfaces.OutputAssembler`."""
