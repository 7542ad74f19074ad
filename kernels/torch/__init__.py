"""Operations in plain torch, for any device: all of a CPU's for 16-bit types, and those for which others have no kernel."""
