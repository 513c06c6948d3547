// Declarations of AppKit, as those of SwiftUI.
import Foundation
import SwiftUI

@MainActor open class NSApplication {
    public enum ActivationPolicy: Int, Sendable { case regular, accessory, prohibited }
    public class var shared: NSApplication { fatalError("a declaration") }
    @discardableResult open func setActivationPolicy(_ policy: ActivationPolicy) -> Bool { true }
    open func activate() {}
    open func terminate(_ sender: Any?) {}
}

open class NSImage {
    public init?(data: Data) {}
}

extension Image {
    public init(nsImage: NSImage) { self.init(systemName: "") }
}

extension FileManager {
    public func containerURL(forSecurityApplicationGroupIdentifier group: String) -> URL? { nil }
}

extension URL {
    public static var applicationSupportDirectory: URL { fatalError("a declaration") }
    public func startAccessingSecurityScopedResource() -> Bool { false }
    public func stopAccessingSecurityScopedResource() {}
}
