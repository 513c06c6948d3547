/// A token of an answer, how likely it was, and what else was likely at its place.
public struct TokenLogprob: Sendable, Hashable, Decodable {
    /// One token with its log-probability.
    public struct Candidate: Sendable, Hashable, Decodable {
        /// The token's text; where a character is spread over several tokens, it has marks for what is missing.
        public var token: String
        /// The natural logarithm of its probability.
        public var logprob: Double
        /// The token's exact bytes, where the server names them.
        public var bytes: [UInt8]?

        public init(token: String, logprob: Double, bytes: [UInt8]? = nil) {
            (self.token, self.logprob, self.bytes) = (token, logprob, bytes)
        }
    }

    public var chosen: Candidate
    /// The likeliest tokens, as many as were asked for.
    public var top: [Candidate]

    public init(chosen: Candidate, top: [Candidate] = []) { (self.chosen, self.top) = (chosen, top) }

    private enum Fields: String, CodingKey { case top = "top_logprobs" }

    public init(from decoder: any Decoder) throws {
        chosen = try Candidate(from: decoder)
        top = try decoder.container(keyedBy: Fields.self).decodeIfPresent([Candidate].self, forKey: .top) ?? []
    }
}
