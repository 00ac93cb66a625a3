"""The performance model beside measured runs: reading them, fitting coefficients, errors on what was held out."""
