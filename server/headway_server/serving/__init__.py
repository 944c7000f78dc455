"""What every transport calls: which models are here, admission, limits. It knows no transport."""
