"""Flight delay: does a flight out of New York arrive more than 15 minutes late?"""
