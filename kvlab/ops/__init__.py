"""Operations: one file each, which checks a call, chooses the backend and launches it."""
