import Foundation

/// Why a model did not answer.
public enum LanguageModelError: LocalizedError {
    case contextSizeExceeded(ContextSizeExceeded)
    case rateLimited(RateLimited)
    case guardrailViolation(GuardrailViolation)
    case refusal(Refusal)
    case unsupportedCapability(UnsupportedCapability)
    case unsupportedTranscriptContent(UnsupportedTranscriptContent)
    case unsupportedGenerationGuide(UnsupportedGenerationGuide)
    case timeout(Timeout)

    public struct ContextSizeExceeded: Sendable {
        public var contextSize: Int
        public var tokenCount: Int
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(contextSize: Int, tokenCount: Int, debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.contextSize, self.tokenCount) = (contextSize, tokenCount)
            (self.debugDescription, self.metadata) = (debugDescription, metadata)
        }
    }

    public struct RateLimited: Sendable {
        public var resetDate: Date?
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(resetDate: Date?, debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.resetDate, self.debugDescription, self.metadata) = (resetDate, debugDescription, metadata)
        }
    }

    public struct GuardrailViolation: Sendable {
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.debugDescription, self.metadata) = (debugDescription, metadata)
        }
    }

    public struct Refusal: Sendable {
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(explanation: String, debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.debugDescription, self.metadata) = (debugDescription, metadata)
        }
    }

    public struct UnsupportedCapability: Sendable {
        public var capability: LanguageModelCapabilities.Capability
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(
            capability: LanguageModelCapabilities.Capability, debugDescription: String, metadata: [String: any Sendable] = [:]
        ) {
            (self.capability, self.debugDescription, self.metadata) = (capability, debugDescription, metadata)
        }
    }

    public struct UnsupportedTranscriptContent: Sendable {
        public var unsupportedContent: [Transcript.Entry]
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(unsupportedContent: [Transcript.Entry], debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.unsupportedContent, self.debugDescription, self.metadata) = (unsupportedContent, debugDescription, metadata)
        }
    }

    public struct UnsupportedGenerationGuide: Sendable {
        public var schemaName: String?
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(schemaName: String?, debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.schemaName, self.debugDescription, self.metadata) = (schemaName, debugDescription, metadata)
        }
    }

    public struct Timeout: Sendable {
        public var debugDescription: String
        public var metadata: [String: any Sendable]
        public init(debugDescription: String, metadata: [String: any Sendable] = [:]) {
            (self.debugDescription, self.metadata) = (debugDescription, metadata)
        }
    }
}
